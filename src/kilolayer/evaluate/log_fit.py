"""A logarithmic law of depth: the score grows by the same amount whenever the depth is multiplied by the same factor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kilolayer.errors import InputError


@dataclass(frozen=True)
class LogFit:
    """score = intercept + slope log(depth), with the natural logarithm, fitted by least squares.

    slope_error: the standard error of the slope; NaN with two points.
    r2: the fraction of the scores' variance that the law explains; NaN if they do not vary.
    left_out_error: the leave-one-out root mean square error, in which each point is predicted from a fit to the others; NaN
    with two points.
    """

    intercept: float
    slope: float
    slope_error: float
    r2: float
    left_out_error: float
    points: int

    def predict(self, depth: float) -> float:
        """The score that the law predicts for a depth."""
        return self.intercept + self.slope * math.log(depth)

    def __str__(self) -> str:
        sign = "-" if self.slope < 0 else "+"
        return f"{self.intercept:.4g} {sign} {abs(self.slope):.3g} log(depth), R^2 {self.r2:.3f}"


def fit_log(depths: Sequence[float], scores: Sequence[float]) -> LogFit:
    """Fit the law to the scores of at least two different depths."""
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
    # The leverage of a point: its leave-one-out error is its residual times 1 / (1 - leverage).
    weight = 1 / len(x) + apart**2 / spread
    freedom = len(x) - 2
    alone = (weight > 1 - 1e-12).any()  # without this point nothing can be fitted
    return LogFit(
        intercept=float(score.mean() - slope * x.mean()),
        slope=slope,
        slope_error=math.sqrt(unexplained / freedom / spread) if freedom else math.nan,
        r2=1 - unexplained / varied if varied else math.nan,
        left_out_error=math.nan if alone else float(np.sqrt(((missed / (1 - weight)) ** 2).mean())),
        points=len(x),
    )
