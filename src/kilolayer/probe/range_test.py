"""A learning-rate range test: the rate rises step by step until the model breaks, and where it breaks is read off the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kilolayer.probe.trial import Measured, Trial

LOWEST, HIGHEST = 1e-5, 1.0


def rise(trial: Trial, steps: int, lowest: float = LOWEST, highest: float = HIGHEST) -> list[Measured]:
    """Steps whose rate rises geometrically from `lowest` to `highest`; it ends with the first that is not finite."""
    found: list[Measured] = []
    for index in range(steps):
        found.append(trial.step(lowest * (highest / lowest) ** (index / max(1, steps - 1)), layers=True))
        if not (math.isfinite(found[-1].nll) and math.isfinite(found[-1].gradient)):
            break
    return found


def smoothed(values: Sequence[float], weight: float = 0.7) -> list[float]:
    """The running mean with this weight on what was before, corrected for its start; infinite from the first value that is not
    finite."""
    mean, means = 0.0, []
    for count, value in enumerate(values, 1):
        mean = weight * mean + (1 - weight) * value
        means.append(mean / (1 - weight**count) if math.isfinite(mean) else math.inf)
    return means
