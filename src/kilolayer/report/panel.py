"""A plot with its title, as the templates lay it out. The page's script redraws lines, for zooming and reading values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from kilolayer.report.figure import Series, thinned
from kilolayer.report.plots import line_plot, line_styles
from kilolayer.report.record import Entry, number
from kilolayer.report.table import Table

MOST = 1000
"""Maximum number of points of a line that the script draws."""
Ends = tuple[float, float]
"""The smallest and the largest x of a plot."""


@dataclass(frozen=True)
class Panel:
    """A plot with its title, a note under the title, and the data that it shows.

    chart: the data that the script draws. is_wide: as wide as the page, whatever is beside it.
    """

    svg: Markup | None
    title: str
    note: str = ""
    numbers: Table | None = None
    chart: dict[str, Any] | None = None
    is_wide: bool = False


def chart_panel(
    name: str,
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    description: str,
    note: str = "",
    log: bool = False,
    from_zero: bool = False,
    ordered: bool = False,
    ends: Ends | None = None,
) -> Panel:
    """Create a panel with lines, as a static plot and as data for the script; without a finite value it has no plot.

    name: unique on the page. The other options are those of `line_plot`. Panels with the same `x_label` zoom together.
    """
    options = {"x_label": x_label, "y_label": y_label, "log": log, "from_zero": from_zero, "ends": ends}
    svg = line_plot(name, series, description=description, ordered=ordered, **options)
    if svg is None:
        return Panel(None, title, note)
    drawn = [each for each in series if any(map(math.isfinite, each.y))]
    finite = [value for each in drawn for value in each.y if math.isfinite(value)]
    curves = [_curve(each, *style) for each, style in zip(drawn, line_styles(drawn, ordered), strict=True)]
    log = log and min(finite) > 0
    return Panel(svg, title, note, chart={"name": name, "about": description, **options, "log": log, "curves": curves})


def series_of(name: str, entries: Sequence[Entry], key: str, colour: str | None = None, dash: tuple[int, ...] = ()) -> Series:
    """A series of the values of `key` by step."""
    steps = [number(entry, "step") for entry in entries]
    return Series(name, steps, [number(entry, key) for entry in entries], colour, dash)


def _curve(series: Series, colour: str, dash: tuple[int, ...]) -> dict[str, Any]:
    """The points of a line for the script, None for a gap; a line that ends in a gap is marked as diverged there."""
    x, y = (values.tolist() for values in thinned(series, MOST))
    return {
        "name": series.name,
        "colour": colour,
        "dash": list(dash),
        "fatal": not math.isfinite(series.y[-1]),
        "x": [int(step) if step == round(step) else float(f"{step:.10g}") for step in x],
        "y": [float(f"{value:.5g}") if math.isfinite(value) else None for value in y],
    }
