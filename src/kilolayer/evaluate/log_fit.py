"""A law of depth: a score that grows by the same amount whenever the depth is multiplied by the same factor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kilolayer.errors import InputError


@dataclass(frozen=True)
class LogFit:
    """score = intercept + slope log(depth), log to the base e, by least squares.

    slope_error: the standard error of the slope, NaN with two points. r2: the share of the scores' variance that the law
    explains, NaN where they do not vary. left_out_error: the root mean square error of each point's prediction from the law
    fitted to the others, NaN with two points.
    """

    intercept: float
    slope: float
    slope_error: float
    r2: float
    left_out_error: float
    points: int

    def predict(self, depth: float) -> float:
        """The score that the law gives a depth."""
        return self.intercept + self.slope * math.log(depth)

    def __str__(self) -> str:
        sign = "-" if self.slope < 0 else "+"
        return f"{self.intercept:.4g} {sign} {abs(self.slope):.3g} log(depth), R^2 {self.r2:.3f}"


def fit_log(depths: Sequence[float], scores: Sequence[float]) -> LogFit:
    """The law of at least two different depths, each with a score."""
    if len(depths) != len(scores):
        raise InputError(f"{len(depths)} depths for {len(scores)} scores", fix="give one score per depth")
    depth, score = np.asarray(depths, dtype=float), np.asarray(scores, dtype=float)
    if not (np.isfinite(score).all() and np.isfinite(depth).all() and (depth > 0).all()):
        raise InputError("a law of depth needs positive depths and finite scores", fix="leave out runs that diverged")
    if len(set(depths)) < 2:
        raise InputError("a law of depth needs at least two different depths")
    x = np.log(depth)
    apart = x - x.mean()
    spread = float((apart**2).sum())
    above = score - score.mean()
    slope = float((apart * above).sum() / spread)
    missed = above - slope * apart
    unexplained, varied = float((missed**2).sum()), float((above**2).sum())
    # A point's own weight in its fitted value; without it, its error grows by 1 / (1 - weight).
    weight = 1 / len(x) + apart**2 / spread
    freedom = len(x) - 2
    alone = (weight > 1 - 1e-12).any()  # without this point there is no law
    return LogFit(
        intercept=float(score.mean() - slope * x.mean()),
        slope=slope,
        slope_error=math.sqrt(unexplained / freedom / spread) if freedom else math.nan,
        r2=1 - unexplained / varied if varied else math.nan,
        left_out_error=math.nan if alone else float(np.sqrt(((missed / (1 - weight)) ** 2).mean())),
        points=len(x),
    )
