"""The result of a search."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kilolayer.errors import InputError


@dataclass(frozen=True)
class Hypothesis:
    """A decoded sequence.

    tokens: without start and end.
    log_probability: the model's, including the end token.
    score: log_probability / length^penalty in beam search, else log_probability.
    ended: False if it was cut at the maximum length.
    """

    tokens: list[int]
    score: float
    log_probability: float
    ended: bool

    def __post_init__(self) -> None:
        refuse_nan(self.log_probability)


def refuse_nan(log_probability: float) -> None:
    """Raise if a log-probability is NaN: the model's output is not usable."""
    if math.isnan(log_probability):
        raise InputError("the model's scores are NaN", fix="its weights are broken: use an earlier checkpoint")
