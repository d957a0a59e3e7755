"""Points with fitted curves over a logarithmic x axis as inline SVG, such as a score by depth or a loss by model size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from markupsafe import Markup

from kilolayer.report.figure import (
    LEGEND,
    MARKERS,
    PALETTE,
    STYLE,
    Series,
    logarithmic,
    new_axes,
    shortened,
    ticks_at_values,
    to_svg,
)


@dataclass(frozen=True)
class Measured(Series):
    """Points without a line. errors: the length of each point's error bar, up and down; empty for no error bars."""

    errors: Sequence[float] = ()


def fit_plot(
    name: str,
    measured: Sequence[Measured],
    fits: Sequence[Series] = (),
    *,
    x_label: str,
    y_label: str,
    description: str,
    log_x: bool = True,
    log_y: bool = False,
) -> Markup | None:
    """Draw points and the curves fitted to them as SVG; None if no point is finite.

    fits: drawn as dashed lines; a curve with the same name as measured points has their colour and no legend entry of its own.
    log_x, log_y: use a logarithmic axis if all values are positive. If there are few distinct x, the ticks are at these.
    """
    drawn = [(each, *_finite(each)) for each in measured]
    drawn = [(each, x, y, errors) for each, x, y, errors in drawn if len(x)]
    if not drawn:
        return None
    colours = {each.name: PALETTE[index % len(PALETTE)] for index, (each, *_) in enumerate(drawn)}
    with mpl.rc_context(STYLE):
        figure, axes = new_axes(x_label, y_label)
        for index, (each, x, y, errors) in enumerate(drawn):
            axes.errorbar(
                x,
                y,
                yerr=errors if np.isfinite(errors).any() else None,
                fmt=MARKERS[index % len(MARKERS)],
                color=colours[each.name],
                markersize=5,
                capsize=3,
                elinewidth=1.2,
                label=shortened(each.name),
            )
        for index, fit in enumerate(fits):
            colour = colours.get(fit.name, PALETTE[(len(drawn) + index) % len(PALETTE)])
            label = None if fit.name in colours else shortened(fit.name)
            axes.plot(fit.x, fit.y, color=colour, linestyle="--", linewidth=1.3, label=label)
        every_x, every_y = np.concatenate([x for _, x, _, _ in drawn]), np.concatenate([y for _, _, y, _ in drawn])
        if log_y and (every_y > 0).all():
            logarithmic(axes, every_y)
        ticks_at_values(axes, every_x, log=log_x)
        if len({*colours, *(fit.name for fit in fits)}) > 1:
            axes.legend(ncols=min(len(axes.get_legend_handles_labels()[1]), 3), **LEGEND)
        return to_svg(figure, name, description)


def _finite(points: Measured) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, y and errors of the points whose x and y are finite: [points] each; errors are NaN if there are none."""
    x, y = np.array(points.x, dtype=float), np.array(points.y, dtype=float)
    errors = np.array(points.errors if len(points.errors) else [math.nan] * len(x), dtype=float)
    kept = np.isfinite(x) & np.isfinite(y)
    return x[kept], y[kept], np.where(np.isfinite(errors), np.abs(errors), math.nan)[kept]
