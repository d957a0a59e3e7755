"""The HTML page of a comparison: table, grid, and interactive curves; without scripts, static plots."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from kilolayer.files.writing import write
from kilolayer.report.axis_colours import show_value
from kilolayer.report.comparison_data import Axis, axes_of, comparison_data, metrics_of, series_of_runs, title_of
from kilolayer.report.comparison_view import ComparisonView
from kilolayer.report.curves_plot import Curve, curves_plot
from kilolayer.report.figure import Series, as_file
from kilolayer.report.grid_plot import grid_plot
from kilolayer.report.numbers import show_number
from kilolayer.report.panel import Panel
from kilolayer.report.table import Table
from kilolayer.report.templating import script, script_json, template
from kilolayer.terminal import counted

STILL = 2  # number of static plots for readers without scripts
BIGGER = 1.5  # screen pixels per point of the grid's plot


def write_comparison_page(path: Path, view: ComparisonView) -> None:
    """Write the page, and its grid as grid.svg beside it where there is one."""
    grid = grid_plot("grid", view.grid) if view.grid is not None else None
    # Unpaired surrogates, which JSON and folder names may contain, cannot be encoded as UTF-8.
    write(path, render_comparison(view, grid).encode("utf-8", "backslashreplace"))
    if grid is not None:
        write(path.with_name("grid.svg"), as_file(grid).encode("utf-8", "backslashreplace"))


def render_comparison(view: ComparisonView, grid: Markup | None = None) -> str:
    """The page of a comparison as HTML, with the plot of its grid."""
    axes, curves = axes_of(view), series_of_runs(view.runs)
    metrics = metrics_of(curves)
    text, digest = script("plot.js", "comparison.js")
    return template("comparison.html").render(
        title=view.title,
        facts=view.facts,
        notes=view.notes,
        commands=view.commands,
        table=view.table,
        table_note=view.table_note,
        grid=grid,
        grid_width=_width(grid),
        stills=[panel for panel in _static_plots(axes[0], metrics, curves) if panel.svg],
        runs=_runs_table(view, curves),
        data=script_json(comparison_data(view, axes, metrics, curves)),
        script=text,
        script_hash=digest,
    )


def plots_of(view: ComparisonView) -> list[Panel]:
    """The plots of the page that need no script: the grid, if there is one, and the curves."""
    axes, curves = axes_of(view), series_of_runs(view.runs)
    grid = [] if view.grid is None else [Panel(grid_plot("grid", view.grid), view.title, view.table_note)]
    return [*grid, *_static_plots(axes[0], metrics_of(curves), curves)]


def _static_plots(axis: Axis, metrics: Sequence[str], curves: Sequence[Mapping[str, Series]]) -> list[Panel]:
    panels: list[Panel] = []
    for place, metric in enumerate(metrics[:STILL]):
        title = title_of(metric)
        looks = [axis.looks[look] for look in axis.places]
        drawn = [Curve(of_run[metric], look) for of_run, look in zip(curves, looks, strict=True) if metric in of_run]
        described = f"{title} of {counted(len(drawn), 'run')} by step, coloured by {axis.title}"
        svg = curves_plot(f"still-{place}", drawn, x_label="step", y_label=title, description=described)
        panels.append(Panel(svg, f"{title[:1].upper()}{title[1:]}, coloured by {axis.title}"))
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


def _width(grid: Markup | None) -> int:
    """The maximum width of the plot in pixels, so that its text does not grow with the screen."""
    box = re.search(r'viewBox="\S+ \S+ (\S+) ', grid or "")
    return round(BIGGER * float(box[1])) if box else 0
