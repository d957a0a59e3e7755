"""Plots that several reproductions share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kilolayer.evaluate.log_fit import fit_log
from kilolayer.report.figure import Series
from kilolayer.report.fit import Measured, fit_plot
from kilolayer.report.panel import Panel
from kilolayer.report.plots import line_plot
from kilolayer.reproduce.cells import grid_of
from kilolayer.reproduce.stored_run import Run


def by_column(runs: Sequence[Run], row: str, column: str, label: str, title: str) -> Panel:
    """A line for each value of `row`: the loss over the numeric values of `column`, with a gap where no run survived."""
    grid = grid_of(runs, row, column)
    series = [
        Series(str(name), [float(at) for at in cells], [cell.loss for cell in cells.values()]) for name, cells in grid.items()
    ]
    svg = line_plot(_id(title), series, x_label=label, y_label="validation loss", description=title, log_x=True)
    return Panel(svg, title, "Runs that did not live to the end leave a gap.")


def first_by(runs: Sequence[Run], option: str) -> dict[str, Run]:
    """The first run of each value of an option, in the order of the values."""
    found: dict[str, Run] = {}
    for run in runs:
        value = run["options"][option]
        found.setdefault(f"{value:g}" if isinstance(value, float) else str(value), run)
    return found


def curves(runs: Mapping[str, Run], key: str, title: str) -> Panel:
    """The losses (`key`: train or valid) of named runs by step."""
    series = [
        Series(name, [step for step, _ in run[key]], [math.nan if loss is None else loss for _, loss in run[key]])
        for name, run in runs.items()
    ]
    svg = line_plot(_id(title), series, x_label="step", y_label="loss, nats per token", description=title)
    return Panel(svg, title)


def lines(
    values: Mapping[str, Sequence[tuple[float, float]]],
    title: str,
    x_label: str,
    y_label: str,
    log: bool = False,
    log_x: bool = False,
    note: str = "",
) -> Panel:
    """A plot of named lines. log, log_x: use logarithmic axes. note: a sentence below the plot."""
    series = [Series(name, [x for x, _ in points], [y for _, y in points]) for name, points in values.items()]
    svg = line_plot(_id(title), series, x_label=x_label, y_label=y_label, description=title, log=log, log_x=log_x)
    return Panel(svg, title, note)


def depth_law(points: Sequence[tuple[float, float]], title: str, y_label: str) -> Panel:
    """Scores over the logarithm of depth, with a fitted line if there are enough points."""
    depths, scores = [depth for depth, _ in points], [score for _, score in points]
    fits = []
    if len(set(depths)) > 1:
        law = fit_log(depths, scores)
        fits = [Series("fit", depths, [law.intercept + law.slope * math.log(depth) for depth in depths])]
    measured = [Measured("measured", depths, scores)]
    svg = fit_plot(_id(title), measured, fits, x_label="layers", y_label=y_label, description=title)
    return Panel(svg, title)


def _id(title: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in title.lower())
