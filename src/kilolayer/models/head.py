"""The configuration of a sequence head: the option `head=`, and the table [model.head] of a configuration file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kilolayer.config import bounded, check, strict_class


@strict_class
@dataclass(frozen=True, kw_only=True)
class Head:
    """A head that scores a whole sequence from an encoder's output, instead of predicting tokens."""

    outputs: int = bounded(2, least=1, most=2**20)
    """Number of outputs: one per class, or 1 if a number is predicted."""
    pool: Literal["first", "mean"] = "first"
    """What represents the sequence: the state of its first token, or the mean over all tokens that are not padding."""
    pooler: Literal["tanh", "norm", "none"] = "tanh"
    """What is between this and the output layer: "tanh", BERT's tanh(W x + b), "norm", the model's norm as in BEiT, or
    "none"."""
    dropout: float = bounded(0.1, least=0, below=1)
    """Dropout before the output layer."""

    def __post_init__(self) -> None:
        check(self)
