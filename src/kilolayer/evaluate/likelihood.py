"""How well a language model predicts a text: loss, perplexity and bits per byte."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.data.tokenizer import PAD
from kilolayer.data.windows import TextBatch
from kilolayer.evaluate.scores import Score
from kilolayer.models.decoder import Decoder
from kilolayer.runtime.recorder import Recorder, evaluating

MOST_NATS = 69.0
"""No perplexity is larger than e^69: scores.json and the report take no numbers above 1e30."""


def perplexity(loss: float) -> float:
    """e^loss, up to e^69."""
    return math.exp(min(loss, MOST_NATS))


@dataclass(frozen=True)
class TextScore(Score):
    """A score of a text, not limited to 0 to 100."""

    digits: int = 4
    """Number of decimals to show."""


@dataclass(frozen=True)
class TokenLoss:
    """nll: the summed negative log-likelihood, in nats, of `tokens` predicted tokens."""

    nll: float
    tokens: int

    @property
    def loss(self) -> float:
        """Nats per predicted token."""
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """Per predicted token; it cannot be compared between vocabularies or ways of masking."""
        return perplexity(self.loss)

    @property
    def quality(self) -> float:
        """For choosing a checkpoint: larger is better."""
        return -self.loss


@dataclass(frozen=True)
class TextLoss(TokenLoss):
    """The loss of tokens that represent `bytes` bytes of text."""

    bytes: int

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text, with the ends of documents included; comparable between vocabularies."""
        return self.nll / math.log(2) / self.bytes if self.bytes else math.nan

    def metrics(self) -> dict[str, Any]:
        """The values for metrics.jsonl."""
        return {"loss": self.loss, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}

    def scores(self, signature: str) -> dict[str, TextScore]:
        """The scores for scores.json."""
        signature = f"{signature}|tokens:{self.tokens}|bytes:{self.bytes}"
        return {
            "bits_per_byte": TextScore("bits per byte", self.bits_per_byte, signature),
            "perplexity": TextScore("perplexity of a token", self.perplexity, signature),
            "loss": TextScore("loss, nats per token", self.loss, signature),
        }

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}, perplexity {self.perplexity:.2f}, {self.bits_per_byte:.4f} bits per byte"


@torch.inference_mode()
def measure(
    model: Decoder, batches: Iterable[TextBatch], byte_lengths: np.ndarray, recorder: Recorder | None = None
) -> TextLoss:
    """The loss over all labels of `batches`, without dropout.

    byte_lengths: int64 [vocabulary], the bytes that each token represents.
    recorder: runs the forward pass and loss of a batch.
    """

    def nll(inputs: Tensor, labels: Tensor) -> Tensor:
        logits = model(inputs).logits.float().flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), ignore_index=PAD, reduction="none").double().sum()

    total, tokens, size = 0.0, 0, 0
    with evaluating(model, nll, recorder) as run:
        for batch in batches:
            total += float(run(*batch.parts))
            tokens += batch.tokens
            size += int(byte_lengths[batch.labels.numpy()].sum())
    return TextLoss(total, tokens, size)
