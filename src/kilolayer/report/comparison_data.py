"""The data of a comparison for the page's script: metrics, axes with their colours, runs, and downsampled curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kilolayer.report.axis_colours import LINE, Appearance, appearances, dashes
from kilolayer.report.comparison_view import FATAL, ComparisonView, Points, Value, ViewRun
from kilolayer.report.figure import Series, split_into_stretches, thinned
from kilolayer.report.record import LARGEST

TITLES = {
    "loss": "training loss",
    "valid": "validation loss",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
}
BUDGET = 160_000  # points of all curves together: a page of 60 runs stays near 2 MB
FEWEST, MOST = 200, 4000  # points of one curve


class Axis:
    """An option by which runs are told apart: its values, how they are drawn, and which of them each run has.

    looks: the colour of each value, with the dash that names need beyond the number of colours. dashes: those of lines whose
    colour is another axis's.
    """

    def __init__(self, name: str, title: str, values: Sequence[Value], of_runs: Sequence[Value]) -> None:
        order = [*dict.fromkeys(map(_key, [*values, *of_runs]))]
        plain = {_key(value): value for value in [*values, *of_runs]}
        self.name, self.title = name, title
        self.indices = [order.index(_key(value)) for value in of_runs]
        self.looks: list[Appearance] = appearances([plain[key] for key in order])
        self.dashes = dashes([plain[key] for key in order])


def axes_of(view: ComparisonView) -> list[Axis]:
    """The axes with more than one value, the outcome of the runs if it differs, and the run itself."""
    last = [axis.name.rsplit(".", 1)[-1] for axis in view.axes]
    found: list[Axis] = []
    for axis, short in zip(view.axes, last, strict=True):
        title = short.replace("_", " ") if last.count(short) == 1 else axis.name
        found.append(Axis(axis.name, title, axis.values, [run.options.get(axis.name) for run in view.runs]))
    found.append(Axis("outcome", "outcome", [], [run.outcome.replace("_", " ") for run in view.runs]))
    return [axis for axis in found if len(axis.looks) > 1] + [Axis("run", "run", [], [run.name for run in view.runs])]


def drawn_by(axes: Sequence[Axis]) -> tuple[Axis, Axis | None]:
    """The axis that colours tell apart, and the one that dashes do: the recipe and the depth, if both differ."""
    named = {axis.name: axis for axis in axes}
    coloured = named.get("model.recipe", axes[0])
    lined = named.get("layers")
    enough = lined is not coloured and not any(look.dash for look in coloured.looks)
    return coloured, lined if enough else None


def looks_of(axes: Sequence[Axis]) -> tuple[list[Appearance], list[Appearance]]:
    """The appearance of each run in a static plot, and the entries of its legend."""
    coloured, lined = drawn_by(axes)
    looks = [coloured.looks[index] for index in coloured.indices]
    if lined is None:
        return looks, list(dict.fromkeys(looks))
    entries = [
        Appearance(f"{lined.title} {look.label}", LINE, dash) for look, dash in zip(lined.looks, lined.dashes, strict=True)
    ]
    both = [replace(look, dash=lined.dashes[index]) for look, index in zip(looks, lined.indices, strict=True)]
    return both, [*dict.fromkeys(looks), *entries]


def series_of_runs(runs: Sequence[ViewRun]) -> list[dict[str, Series]]:
    """The curves of each run by metric; curves without a finite point are left out."""
    every = [{key: _as_series(key, points) for key, points in run.curves.items()} for run in runs]
    return [{key: series for key, series in curves.items() if np.isfinite(series.y).any()} for curves in every]


def metrics_of(curves: Sequence[Mapping[str, Series]]) -> list[str]:
    """Every metric that any run has, in the order in which runs name them."""
    return list(dict.fromkeys(key for of_run in curves for key in of_run))


def title_of(metric: str) -> str:
    """The display name of a metric."""
    return TITLES.get(metric, metric.replace("_", " "))


def comparison_data(
    view: ComparisonView, axes: Sequence[Axis], metrics: Sequence[str], curves: Sequence[Mapping[str, Series]]
) -> dict[str, Any]:
    """Everything that the script needs, as JSON values.

    colour, line: the indices of the axes that colours and dashes tell apart at first. thinned: the number of points per curve,
    None if all are kept.
    """
    coloured, lined = drawn_by(axes)
    most = min(max(BUDGET // max(sum(map(len, curves)), 1), FEWEST), MOST)
    longest = max((len(series.x) for of_run in curves for series in of_run.values()), default=0)
    return {
        "metrics": [title_of(key) for key in metrics],
        "axes": [
            {
                "title": axis.title,
                "values": [
                    {"label": look.label, "colour": look.colour, "dash": list(look.dash), "line": list(dash)}
                    for look, dash in zip(axis.looks, axis.dashes, strict=True)
                ],
            }
            for axis in axes
        ],
        "colour": axes.index(coloured),
        "line": None if lined is None else axes.index(lined),
        "runs": [
            {
                "name": run.name,
                "outcome": run.outcome_text,
                "fatal": run.outcome in FATAL,
                "values": [axis.indices[index] for axis in axes],
                "curves": [_points(curves[index].get(key), most) for key in metrics],
            }
            for index, run in enumerate(view.runs)
        ],
        "thinned": most if longest > most else None,
    }


def _as_series(name: str, points: Points) -> Series:
    """The points in the order of their steps; values that cannot be drawn become NaN."""
    both = np.array(points, dtype=float).reshape(-1, 2)
    both = both[np.isfinite(both[:, 0])]
    both = both[np.argsort(both[:, 0], kind="stable")]
    return Series(name, both[:, 0].tolist(), np.where(np.abs(both[:, 1]) <= LARGEST, both[:, 1], math.nan).tolist())


def _points(series: Series | None, most: int) -> list[list[float | None]]:
    """Steps and values; for a downsampled curve also the middle and the mean of each interval, for smoothing."""
    if series is None:
        return [[], []]
    found = _listed(*thinned(series, most))
    if len(series.x) <= most:
        return found
    y = split_into_stretches(np.array(series.y), most // 2)
    x = split_into_stretches(np.array(series.x), most // 2)
    filled = np.isfinite(y).any(1)
    return found + _listed(np.nanmean(x[filled], 1), np.nanmean(y[filled], 1))


def _listed(x: np.ndarray, y: np.ndarray) -> list[list[float | None]]:
    """x and y as lists; None in y leaves a gap."""
    steps: list[float | None] = [int(step) if step == round(step) else float(f"{step:.10g}") for step in x.tolist()]
    return [steps, [float(f"{value:.5g}") if math.isfinite(value) else None for value in y.tolist()]]


def _key(value: Value) -> tuple[str, Value]:
    """A dictionary key for which True and 1 differ, but 1 and 1.0 are the same."""
    return ("bool" if isinstance(value, bool) else "", value)
