"""The curves of many runs in one static plot, as inline SVG, for pages without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from kilolayer.report.axis_colours import Appearance
from kilolayer.report.figure import LEGEND, POINTS, STYLE, Series, new_axes, shortened, thinned, to_svg

TOTAL = 10_000  # points of all lines together, so that the plot stays below 200 kB
SIZE = (7.2, 3.8)  # inches
LEGENDS, ROW, ENTRY = 24, 90, 0.2  # legend: maximum number of entries, characters per row, height of a row in inches
MANY_VALUES, FAR = 200, 10  # a range is cut if there are this many values, and it is this many times that of the others
MANY = 12  # with more lines than this, they are drawn thinner
GOLDEN = 0.618034  # its multiples shuffle the drawing order, so that no group of similar colours covers all others


@dataclass(frozen=True)
class Curve:
    """A line and its appearance; lines with the same appearance have one entry in the legend."""

    series: Series
    appearance: Appearance


def curves_plot(
    name: str,
    curves: Sequence[Curve],
    *,
    x_label: str,
    y_label: str,
    description: str,
    legend: Sequence[Appearance] | None = None,
) -> Markup | None:
    """All curves as SVG; None if none has a finite value. The y axis omits a range that only a few points reach.

    legend: its entries; by default one for each appearance of a curve.
    """
    most = max(min(POINTS, TOTAL // max(len(curves), 1)), 20)
    lines = [(curve.appearance, *thinned(curve.series, most)) for curve in curves]
    lines = [(look, x, y) for look, x, y in lines if np.isfinite(y).any()]
    if not lines:
        return None
    looks = list(dict.fromkeys(look for look, _, _ in lines) if legend is None else legend)[:LEGENDS]
    columns = max(1, min(len(looks), ROW // (max(len(shortened(look.label)) for look in looks) + 6)))
    with mpl.rc_context(STYLE):
        figure, axes = new_axes(x_label, y_label, (SIZE[0], SIZE[1] + ENTRY * -(-len(looks) // columns)))
        width, opacity = (0.8, 0.8) if len(lines) > MANY else (1.2, 1.0)
        for index in sorted(range(len(lines)), key=lambda index: index * GOLDEN % 1):
            look, x, y = lines[index]
            style = {"color": look.colour, "linestyle": _style(look), "marker": "." if len(x) < 24 else ""}
            axes.plot(x, y, linewidth=width, alpha=opacity, **style)
        low, high = sensible_range(np.concatenate([y[np.isfinite(y)] for _, _, y in lines]))
        axes.set_ylim(low - 0.04 * (high - low), high + 0.04 * (high - low))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        if len(looks) > 1:
            handles = [Line2D([], [], color=look.colour, linestyle=_style(look), label=shortened(look.label)) for look in looks]
            axes.legend(handles=handles, ncols=columns, **LEGEND)
        return to_svg(figure, name, description, light=True)


def sensible_range(values: np.ndarray) -> tuple[float, float]:
    """The range of all values; without the highest 2% if there are many values and those reach far beyond the rest.

    In a short run, the highest 2% are one point, such as the loss before the first update, which must stay in sight.
    """
    low, high = float(values.min()), float(values.max())
    most = float(np.quantile(values, 0.98, method="lower"))
    if len(values) >= MANY_VALUES and high - low > FAR * (most - low) > 0:
        high = low + 1.1 * (most - low)
    return low, high if high > low else low + max(abs(low), 1.0) * 0.1


def _style(look: Appearance) -> Literal["-"] | tuple[float, tuple[int, ...]]:
    return (0.0, look.dash) if look.dash else "-"
