"""Line plots and heat maps as inline SVG, small enough for the screen of a phone."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from kilolayer.report.figure import (
    DASHES,
    LEGEND,
    MARKERS,
    PALETTE,
    STYLE,
    Series,
    logarithmic,
    new_axes,
    shades,
    shortened,
    thinned,
    ticks_at_values,
    to_svg,
)


def line_plot(
    name: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    description: str,
    log: bool = False,
    log_x: bool = False,
    from_zero: bool = False,
    ordered: bool = False,
    whole: bool = True,
    ends: tuple[float, float] | None = None,
) -> Markup | None:
    """Draw lines over x as SVG; None if no series has a finite value.

    name: unique on the page. log: use a logarithmic y axis if all values allow it. from_zero: start the y axis at 0.
    log_x: use a logarithmic x axis, with ticks at the values of x if they are few, including those where y has gaps.
    whole: put the ticks of x at whole numbers, for steps and layers.
    ordered: the series are one quantity at increasing times, coloured from dark to light instead of in distinct colours.
    ends: the smallest and the largest x, for plots that share an x axis.
    """
    kept = [each for each in series if np.isfinite(np.array(each.y, dtype=float)).any()]
    drawn = [(shortened(each.name), *thinned(each)) for each in kept]
    if not drawn:
        return None
    with mpl.rc_context(STYLE):
        figure, axes = new_axes(x_label, y_label)
        for index, ((label, x, y), (colour, dash)) in enumerate(zip(drawn, line_styles(kept, ordered), strict=True)):
            few = np.isfinite(y).sum() <= 24
            marker = MARKERS[index % len(MARKERS)] if few else None
            style = (0.0, dash) if dash else "-"
            axes.plot(x, y, color=colour, linestyle=style, label=label, marker=marker, markersize=3.5)
        finite = np.concatenate([y[np.isfinite(y)] for _, _, y in drawn])
        if log and (finite > 0).all():
            logarithmic(axes, finite)
        elif from_zero and (finite >= 0).all():
            axes.set_ylim(0, 1.05 * float(finite.max()) or None)
        if ends is not None and ends[1] > ends[0]:
            wide = ends[1] - ends[0]
            axes.set_xlim(ends[0] - 0.01 * wide, ends[1] + 0.01 * wide)
        if log_x:
            every_x = np.concatenate([x for _, x, _ in drawn])
            ticks_at_values(axes, every_x, log=True)
            axes.update_datalim([(x, finite.min()) for x in every_x])  # gaps at the ends are part of the axis
            axes.autoscale_view()
        else:
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=whole))
        if len(drawn) > 1:
            axes.legend(ncols=min(len(drawn), 3), **LEGEND)
        return to_svg(figure, name, description, light=ordered or any(each.colour for each in kept))


def line_styles(series: Sequence[Series], ordered: bool = False) -> list[tuple[str, tuple[int, ...]]]:
    """The colour and dash of each line: its own, or those for its position, so that up to 18 lines differ."""
    colours = shades(len(series)) if ordered else PALETTE
    return [
        (each.colour or colours[index % len(colours)], each.dash or DASHES[index // len(colours) % len(DASHES)])
        for index, each in enumerate(series)
    ]


def heat_plot(
    name: str, rows: Sequence[str], values: Sequence[Sequence[float]], *, x_label: str, scale_label: str, description: str
) -> Markup | None:
    """Draw a heat map as SVG, dark for low values; None if no value is finite. Columns are counted from 1."""
    cells = np.array(values, dtype=float)
    if not np.isfinite(cells).any():
        return None
    with mpl.rc_context(STYLE):
        figure, axes = new_axes(x_label, "")
        image = axes.imshow(cells, aspect="auto", cmap="viridis", interpolation="nearest", vmin=0.0)
        image.set_extent((0.5, cells.shape[1] + 0.5, len(rows) - 0.5, -0.5))
        shown = range(0, len(rows), -(-len(rows) // 12))
        axes.set_yticks(list(shown), [shortened(rows[index]) for index in shown])
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.grid(visible=False)
        figure.colorbar(image, label=scale_label)
        return to_svg(figure, name, description)
