"""Predictions of a model with a head: scores of classes or numbers, their loss, and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.data.example_batches import EncodedExamples, sentence_types
from kilolayer.evaluate.classification import get_metric
from kilolayer.evaluate.scores import Score
from kilolayer.models.config import ModelConfig
from kilolayer.models.encoder import Encoder
from kilolayer.runtime.recorder import Recorder, evaluating


@dataclass(frozen=True)
class LabelLoss:
    """The mean loss of examples, and their metrics by name; the first chooses the best checkpoint."""

    loss: float
    scores: dict[str, Score]

    @property
    def quality(self) -> float:
        """For choosing a checkpoint: larger is better."""
        return next(iter(self.scores.values())).value

    def metrics(self) -> dict[str, Any]:
        """The values for metrics.jsonl; `metric` is the one that chooses the best checkpoint."""
        return {"loss": self.loss, "metric": self.quality, **{key: score.value for key, score in self.scores.items()}}

    def __str__(self) -> str:
        found = ", ".join(f"{score.name} {score.value:.2f}" for score in self.scores.values())
        return f"loss {self.loss:.4f}, {found}"


@torch.inference_mode()
def predict(
    model: Encoder, examples: EncodedExamples, rows: int, most: int | None = None, recorder: Recorder | None = None
) -> np.ndarray:
    """fp32 [examples, outputs]: the scores of all examples, or of `most` from all over the set, without dropout.

    rows: examples per batch.
    recorder: runs the forward pass of a batch.
    """

    def scores(tokens: Tensor) -> Tensor:
        return model(tokens, **types_for(model.config, tokens)).logits.float()

    head = model.config.head
    assert head is not None
    found = np.empty((len(examples) if most is None else min(most, len(examples)), head.outputs), np.float32)
    with evaluating(model, scores, recorder) as run:
        for places, batch in examples.in_order(rows, most):
            logits = run(batch.parts[0])
            found[places] = logits[: len(places)].cpu().numpy()
    return found


def types_for(config: ModelConfig, tokens: Tensor) -> dict[str, Tensor]:
    """The token types argument for tokens int64 [rows, length], if the model has token types: the sentence of a pair."""
    return {"types": sentence_types(tokens)} if (config.token_types or 1) > 1 else {}


def measure_labels(scores: np.ndarray, labels: np.ndarray, classes: int, metrics: Sequence[str]) -> LabelLoss:
    """Compare predicted scores [examples, outputs] with labels [examples]: int64 class indices, or numbers if classes is 0."""
    values = torch.from_numpy(scores).double()
    if classes:
        loss, found = F.cross_entropy(values, torch.from_numpy(labels)), scores.argmax(axis=1)
    else:
        loss, found = F.mse_loss(values[:, 0], torch.from_numpy(labels).double()), scores[:, 0]
    return LabelLoss(float(loss), {key: get_metric(key).score(found, labels, classes) for key in metrics})


def probabilities(scores: np.ndarray) -> np.ndarray:
    """Softmax of the scores, fp64 [examples, classes]."""
    return torch.from_numpy(scores).double().softmax(dim=1).numpy()
