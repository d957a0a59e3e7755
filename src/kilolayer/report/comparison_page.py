"""The HTML page of a comparison: its result, what went wrong, and interactive curves; without scripts, static plots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from kilolayer.files.writing import write
from kilolayer.report.axis_colours import show_value
from kilolayer.report.comparison_data import (
    Axis,
    axes_of,
    comparison_data,
    drawn_by,
    looks_of,
    metrics_of,
    series_of_runs,
    title_of,
)
from kilolayer.report.comparison_view import ComparisonView
from kilolayer.report.curves_plot import Curve, curves_plot
from kilolayer.report.figure import Series, as_file
from kilolayer.report.grid_plot import grid_plot
from kilolayer.report.numbers import show_number
from kilolayer.report.panel import Panel
from kilolayer.report.shaded_table import shaded
from kilolayer.report.table import Table
from kilolayer.report.templating import script, script_json, template
from kilolayer.terminal import counted

STILL = 2  # number of static plots for readers without scripts


def write_comparison_page(path: Path, view: ComparisonView) -> None:
    """Write the page, and its grid as grid.svg beside it where there is one."""
    # Unpaired surrogates, which JSON and folder names may contain, cannot be encoded as UTF-8.
    write(path, render_comparison(view).encode("utf-8", "backslashreplace"))
    if view.grid is not None and (grid := grid_plot("grid", view.grid)) is not None:
        write(path.with_name("grid.svg"), as_file(grid).encode("utf-8", "backslashreplace"))


def render_comparison(view: ComparisonView) -> str:
    """The page of a comparison as HTML."""
    axes, curves = axes_of(view), series_of_runs(view.runs)
    metrics = metrics_of(curves)
    text, digest = script("plot.js", "comparison.js")
    return template("comparison.html").render(
        view=view,
        grids=[shaded(each) for each in ([] if view.grid is None else [view.grid, *view.further_grids])],
        faults=[run for run in view.runs if run.advice],
        stills=[panel for panel in _static_plots(axes, metrics, curves) if panel.svg],
        runs=_runs_table(view, curves),
        data=script_json(comparison_data(view, axes, metrics, curves)),
        script=text,
        script_hash=digest,
    )


def plots_of(view: ComparisonView) -> list[Panel]:
    """The plots of the page that need no script: the grid, if there is one, and the curves."""
    axes, curves = axes_of(view), series_of_runs(view.runs)
    grid = [] if view.grid is None else [Panel(grid_plot("grid", view.grid), view.title, view.table_note)]
    return [*grid, *_static_plots(axes, metrics_of(curves), curves)]


def _static_plots(axes: Sequence[Axis], metrics: Sequence[str], curves: Sequence[Mapping[str, Series]]) -> list[Panel]:
    looks, legend = looks_of(axes)
    coloured, lined = drawn_by(axes)
    by = f"coloured by {coloured.title}" + ("" if lined is None else f", dashed by {lined.title}")
    panels: list[Panel] = []
    for index, metric in enumerate(metrics[:STILL]):
        title = title_of(metric)
        drawn = [Curve(of_run[metric], look) for of_run, look in zip(curves, looks, strict=True) if metric in of_run]
        described = f"{title} of {counted(len(drawn), 'run')} by step, {by}"
        svg = curves_plot(f"still-{index}", drawn, x_label="step", y_label=title, description=described, legend=legend)
        panels.append(Panel(svg, f"{title[:1].upper()}{title[1:]}, {by}"))
    return panels


def _runs_table(view: ComparisonView, curves: Sequence[Mapping[str, Series]]) -> Table:
    """A row for each run: the options that differ, its outcome, losses and scores."""
    names = [axis.name for axis in view.axes]
    scores = list(dict.fromkeys(name for run in view.runs for name in run.scores))
    header = ["run", *names, "outcome", "last training loss", "best validation loss", *scores]
    rows: list[list[str]] = []
    for run, of_run in zip(view.runs, curves, strict=True):
        losses, valid = ([y for y in of_run[key].y if math.isfinite(y)] if key in of_run else [] for key in ("loss", "valid"))
        measured = [losses[-1] if losses else math.nan, min(valid, default=math.nan)]
        measured += [run.scores.get(name, math.nan) for name in scores]
        options = [show_value(run.options.get(name)) for name in names]
        rows.append([run.name, *options, run.outcome_text, *map(show_number, measured)])
    return Table(header, rows)
