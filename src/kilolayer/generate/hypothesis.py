"""What a search returns."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kilolayer.errors import InputError


@dataclass(frozen=True)
class Hypothesis:
    """tokens: without start and end. log_probability: the model's, the end counted.

    score: log_probability / length^penalty in a beam search, else log_probability. ended: False where it was cut.
    """

    tokens: list[int]
    score: float
    log_probability: float
    ended: bool

    def __post_init__(self) -> None:
        refuse_nan(self.log_probability)


def refuse_nan(log_probability: float) -> None:
    """Raise where a model has no answer to give."""
    if math.isnan(log_probability):
        raise InputError("the model's scores are NaN", fix="its weights are broken: use an earlier checkpoint")
