"""A learning-rate range test: the rate increases at every step, and the steps show at which rate the model breaks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kilolayer.probe.trial import Measured, Trial

LOWEST, HIGHEST = 1e-5, 1.0
SMALLEST = 1e-12
"""Smaller shares of the gradient count as this value."""


def sweep_rates(trial: Trial, steps: int, lowest: float = LOWEST, highest: float = HIGHEST) -> list[Measured]:
    """Take steps with a rate that rises geometrically from `lowest` to `highest`; stop after the first that is not finite."""
    found: list[Measured] = []
    for index in range(steps):
        found.append(trial.step(lowest * (highest / lowest) ** (index / max(1, steps - 1)), layers=True))
        if not found[-1].finite:
            break
    return found


def smoothed(values: Sequence[float], weight: float = 0.7) -> list[float]:
    """The exponential moving average with this weight on the past, bias-corrected; infinite from the first non-finite value."""
    mean, means = 0.0, []
    for count, value in enumerate(values, 1):
        mean = weight * mean + (1 - weight) * value
        means.append(mean / (1 - weight**count) if math.isfinite(mean) else math.inf)
    return means
