"""A head as data: what `head=` takes, and what `[model.head]` in a configuration holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kilolayer.config import bounded, check, strict_class


@strict_class
@dataclass(frozen=True, kw_only=True)
class Head:
    """What reads a whole sequence off an encoder, in the place of a vocabulary's scores."""

    outputs: int = bounded(2, least=1, most=2**20)
    """Scores of a sequence: one a class, or one number."""
    pool: Literal["first", "mean"] = "first"
    """What stands for the sequence: the state of its first token, or the mean of all that are no padding."""
    dropout: float = bounded(0.1, least=0, below=1)
    """Dropout before the scores."""

    def __post_init__(self) -> None:
        check(self)
