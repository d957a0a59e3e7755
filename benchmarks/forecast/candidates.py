"""Candidate methods for finding the largest learning rate from a model's first 60 steps.

Each gives an edge in units of the learning rate; one factor, fitted on the shallow rows, turns it into a forecast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kilolayer.probe.range_test import HIGHEST, fading_rate, turning_rate

Measurements = Mapping[str, Any]
Edge = Callable[[Measurements], float]


def one_for_all(measured: Measurements) -> float:
    """The same learning rate for every model: the baseline that a forecast must beat."""
    return 1.0


def turn(measured: Measurements) -> float:
    """The range test: the learning rate at which the smoothed loss is lowest."""
    return turning_rate(of_ramp(measured, "lr"), of_ramp(measured, "nll"))


def update(measured: Measurements) -> float:
    """The learning rate at which, to first order, one Adam step would change the output by as much as its own size."""
    return 1e-4 / measured["update"]


def sharpness(measured: Measurements) -> float:
    """The edge of stability of Adam with beta1 = 0.9: 38 / sharpness (Cohen et al. 2022)."""
    value = measured["sharpness"]["value"]
    return 38 / value if value > 0 else HIGHEST


def fade(measured: Measurements, level: float, of: str = "share") -> float:
    """The rate at which the weakest stack's part of the gradient falls below `level` of its maximum; infinite if never."""
    finite = {"ramp": [step for step in measured["ramp"] if math.isfinite(step["nll"]) and math.isfinite(step["gradient"])]}
    return fading_rate(of_ramp(finite, "lr"), of_ramp(finite, of), level) or math.inf


def of_ramp(measured: Measurements, what: str) -> list[float]:
    return [step[what] for step in measured["ramp"]]


EDGES: dict[str, Edge] = {
    "one rate for all": one_for_all,
    "range test": turn,
    "update": update,
    "sharpness": sharpness,
    **{f"share {level:g}": partial(fade, level=level) for level in (0.3, 0.1, 0.01)},
    **{f"reached {level:g}": partial(fade, level=level, of="reached") for level in (0.1, 0.03, 0.01, 0.003)},
}
