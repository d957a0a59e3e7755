"""Small multiples as inline SVG: the same plot once for each case, with shared axes, so that cases can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kilolayer.report.figure import PALETTE, STYLE, Series, logarithmic, shortened, thinned, to_svg

SIDE = (2.3, 1.7)  # inches of one plot
PER_PLOT = 150  # points of a line


def multiples_plot(
    name: str,
    cases: Mapping[str, Sequence[Series]],
    *,
    x_label: str,
    y_label: str,
    description: str,
    columns: int = 3,
    log: bool = False,
    highest: float | None = None,
) -> Markup | None:
    """A small line plot for each case, row by row, as SVG; None where no value is finite.

    Lines of one name have one colour in all plots, and stand once in the legend. log: a logarithmic y axis, where all values
    allow it. highest: where the y axis ends at most, so that one case that diverges does not flatten the others.
    """
    lines = {case: [(each.name, *thinned(each, PER_PLOT)) for each in series] for case, series in cases.items()}
    finite = np.concatenate([y[np.isfinite(y)] for series in lines.values() for _, _, y in series] or [np.empty(0)])
    if not finite.size:
        return None
    names = list(dict.fromkeys(name for series in lines.values() for name, _, _ in series))
    colours = {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(names)}
    across = min(columns, len(cases))
    down = -(-len(cases) // across)
    with mpl.rc_context({**STYLE, "font.size": 8}):
        figure = Figure(figsize=(max(across * SIDE[0], 3.2), down * SIDE[1] + 0.6), layout="constrained")
        grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
        handles = {}
        for axes, (case, series) in zip(grid.flat, lines.items(), strict=False):
            axes.set_title(shortened(case), fontsize=9)
            for line, x, y in series:
                handles[line] = axes.plot(x, y, color=colours[line], linewidth=1.3)[0]
            axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
        for axes in list(grid.flat)[len(cases) :]:
            axes.set_visible(False)
        for column in range(across):  # the lowest plot of each column has the numbers of x
            lowest = grid[(len(cases) - 1 - column) // across, column]
            lowest.tick_params(labelbottom=True)
        first = grid.flat[0]
        if log and (finite > 0).all():
            logarithmic(first, finite)
        if highest is not None and finite.max() > highest > finite.min():
            first.set_ylim(top=highest)
        figure.supxlabel(x_label, fontsize=9)
        figure.supylabel(y_label, fontsize=9)
        if len(names) > 1:
            labels = [shortened(each) for each in handles]
            figure.legend(list(handles.values()), labels, loc="outside upper center", ncols=min(len(names), 4))
        return to_svg(figure, name, description)
