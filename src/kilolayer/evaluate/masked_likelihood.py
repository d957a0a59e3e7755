"""How well a masked language model predicts hidden tokens: loss, perplexity and accuracy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.data.masking import MaskedBatch, inputs_of
from kilolayer.data.tokenizer import PAD
from kilolayer.errors import InputError
from kilolayer.evaluate.likelihood import TextScore, TokenLoss
from kilolayer.models.encoder import Encoder
from kilolayer.runtime.recorder import Recorder, evaluating


@dataclass(frozen=True)
class MaskedLoss(TokenLoss):
    """The loss of hidden tokens; for `correct` of them the top prediction is right."""

    correct: int

    @property
    def accuracy(self) -> float:
        """The percentage of hidden tokens for which the top prediction is right."""
        return 100 * self.correct / self.tokens

    def metrics(self) -> dict[str, Any]:
        """The values for metrics.jsonl."""
        return {"loss": self.loss, "perplexity": self.perplexity, "accuracy": self.accuracy}

    def scores(self, signature: str) -> dict[str, TextScore]:
        """The scores for scores.json."""
        signature = f"{signature}|masked:{self.tokens}"
        return {
            "accuracy": TextScore("accuracy of masked tokens, %", self.accuracy, signature, digits=2),
            "perplexity": TextScore("perplexity of a masked token", self.perplexity, signature),
            "loss": TextScore("loss, nats per masked token", self.loss, signature),
        }

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}, perplexity {self.perplexity:.2f}, accuracy {self.accuracy:.2f}%"


@torch.inference_mode()
def measure_masked(model: Encoder, batches: Iterable[MaskedBatch], recorder: Recorder | None = None) -> MaskedLoss:
    """The loss and accuracy over all labels of `batches`, without dropout.

    recorder: runs the forward pass and loss of a batch.
    """

    def sums(*parts: Tensor) -> Tensor:
        inputs, labels = inputs_of(parts)
        logits = model(**inputs).logits
        assert logits is not None
        nll = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=PAD, reduction="none")
        correct = (logits.argmax(dim=-1) == labels) & (labels != PAD)
        return torch.stack([nll.double().sum(), correct.double().sum()])

    nll, correct, tokens = 0.0, 0, 0
    with evaluating(model, sums, recorder) as run:
        for batch in batches:
            found = run(*batch.parts).tolist()
            nll, correct, tokens = nll + found[0], correct + int(found[1]), tokens + batch.tokens
    if not tokens:
        raise InputError("the text has no token that can be predicted", fix="take text that the vocabulary knows tokens of")
    return MaskedLoss(nll, tokens, correct)
