"""A learning-rate range test: the rate rises step by step until the model breaks, and where it breaks is read off the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kilolayer.probe.trial import Measured, Trial

LOWEST, HIGHEST = 1e-5, 1.0
SMALLEST = 1e-12
"""Of a share of the gradient: what is less is as good as none."""


def rise(trial: Trial, steps: int, lowest: float = LOWEST, highest: float = HIGHEST) -> list[Measured]:
    """Steps whose rate rises geometrically from `lowest` to `highest`; it ends with the first that is not finite."""
    found: list[Measured] = []
    for index in range(steps):
        found.append(trial.step(lowest * (highest / lowest) ** (index / max(1, steps - 1)), layers=True))
        if not found[-1].finite:
            break
    return found


def turning_rate(rates: Sequence[float], losses: Sequence[float]) -> float:
    """The rate at which the smoothed loss is lowest."""
    means = smoothed(losses)
    return rates[means.index(min(means))]


def fading_rate(rates: Sequence[float], shares: Sequence[float], level: float) -> float | None:
    """The first rate at which a share of the gradient, smoothed in its logarithm, is below `level` of its largest before.

    None where it never is. A share that begins near 0 and rises, as where branches start switched off, has not faded.
    """
    largest = -math.inf
    for rate, mean in zip(rates, smoothed([math.log(max(share, SMALLEST)) for share in shares]), strict=True):
        largest = max(largest, mean)
        if mean < largest + math.log(level):
            return rate
    return None


def smoothed(values: Sequence[float], weight: float = 0.7) -> list[float]:
    """The running mean with this weight on what was before, corrected for its start; infinite from the first value on that is
    not finite."""
    mean, means = 0.0, []
    for count, value in enumerate(values, 1):
        mean = weight * mean + (1 - weight) * value
        means.append(mean / (1 - weight**count) if math.isfinite(mean) else math.inf)
    return means
