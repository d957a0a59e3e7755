"""Contour plots, optionally with a path: the loss around a model, and the path of training."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from kilolayer.report.figure import PALETTE, STYLE, new_axes

SIZE = (4.8, 3.8)  # inches
LEVELS = 14
DOTS = 40  # a path with more points is drawn as a line without dots


def contour_figure(
    x: Sequence[float] | np.ndarray,
    y: Sequence[float] | np.ndarray,
    z: Sequence[Sequence[float]] | np.ndarray,
    *,
    x_label: str,
    y_label: str,
    scale_label: str,
    path: Sequence[tuple[float, float]] | None = None,
    highest: float | None = None,
    log: bool = False,
) -> Figure | None:
    """Filled contours of z [len(y)][len(x)], dark for low values; None if no value is finite.

    x, y: increasing. path: points of the plane; its start is marked by a circle and its end by a cross. highest: values above
    it, and +inf, have the lightest colour; NaN is grey. log: logarithmic levels, if all values are positive.
    """
    heights = np.array(z, dtype=float)
    if not np.isfinite(heights).any() or min(heights.shape) < 2:
        return None
    low, largest = float(heights[np.isfinite(heights)].min()), float(heights[np.isfinite(heights)].max())
    high = largest if highest is None else min(max(highest, low), largest)
    high = max(high, low + 1e-6 * max(abs(low), 1.0))
    is_log = log and low > 0
    levels = np.geomspace(low, high, LEVELS) if is_log else np.linspace(low, high, LEVELS)
    levels[0], levels[-1] = low, high  # the lowest point lies inside, whatever the rounding
    beyond = bool((heights > high).any())
    with mpl.rc_context(STYLE):
        figure, axes = new_axes(x_label, y_label, SIZE)
        axes.set_facecolor("#cccccc")
        axes.grid(visible=False)
        # Infinity cannot be contoured, so it is replaced by a number above all levels.
        clipped = np.ma.masked_invalid(np.where(np.isposinf(heights), max(largest, high + abs(high) + 1), heights))
        norm = LogNorm(low, high) if is_log else Normalize(low, high)
        filled = axes.contourf(x, y, clipped, levels, norm=norm, cmap="viridis", extend="max" if beyond else "neither")
        axes.contour(x, y, clipped, levels, colors="white", linewidths=0.4, alpha=0.7)
        bar = figure.colorbar(filled, label=scale_label, ticks=levels[:: (LEVELS - 1) // 4 or 1])
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        bar.ax.minorticks_off()
        if path:
            _draw_path(axes, np.array(path, dtype=float))
        return figure


def _draw_path(axes: Axes, path: np.ndarray) -> None:
    """path: [points, 2]."""
    across, up = path[:, 0], path[:, 1]
    axes.plot(across, up, color="white", linewidth=3.2)
    marker = "o" if len(path) <= DOTS else ""
    axes.plot(across, up, color=PALETTE[1], linewidth=1.6, marker=marker, markersize=3)
    axes.plot(across[:1], up[:1], "o", color="white", markeredgecolor=PALETTE[1], markersize=8, clip_on=False)
    axes.plot(across[-1:], up[-1:], "X", color="white", markeredgecolor=PALETTE[1], markersize=9, clip_on=False)
