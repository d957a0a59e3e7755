"""Heat maps of one value per layer as inline SVG: by training step, and by kind of sublayer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter, MaxNLocator

from kilolayer.report.colour_scale import ColourScale
from kilolayer.report.figure import POINTS, SIZE, STYLE, shortened, to_svg


def layers_by_step_plot(
    name: str,
    steps: Sequence[float],
    stacks: Mapping[str, Sequence[Sequence[float]]],
    *,
    scale_label: str,
    description: str,
    ends: tuple[float, float] | None = None,
) -> Markup | None:
    """Draw positive values by layer (y) and step (x) as heat maps with a common logarithmic colour scale, as SVG.

    stacks: [steps][layers] for each stack, the first at the bottom; NaN, for no value, is drawn in grey.
    ends: the first and the last step of the x axis; by default those of `steps`. Each step shows the nearest measurement.
    Returns None if no value is positive.
    """
    first, last = ends if ends is not None and ends[1] > ends[0] else (min(steps, default=0), max(steps, default=0))
    kept = _nearest(np.array(steps, dtype=float), np.linspace(first, last, POINTS) if last > first else np.array([first]))
    images = {stack: _rows([columns[index] for index in kept]).T for stack, columns in stacks.items() if steps}
    if (scale := ColourScale.of(images.values(), log=True)) is None:
        return None
    with mpl.rc_context(STYLE):
        figure, rows = _stacked([1.9] * len(images))
        drawn: list[AxesImage] = []
        for axes, (stack, image) in zip(rows, images.items(), strict=True):
            extent = (first, last if last > first else first + 1, 0.5, image.shape[0] + 0.5)
            drawn.append(scale.draw(axes, image, origin="lower", extent=extent))
            axes.set_ylabel(f"{stack} layer")
            axes.yaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
            axes.tick_params(labelbottom=axes is rows[0])
        for axes in rows:
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
        rows[0].set_xlabel("step")
        scale.add_bar(figure, drawn, rows, scale_label)
        return to_svg(figure, name, description)


def _nearest(steps: np.ndarray, wanted: np.ndarray) -> list[int]:
    """The index of the measurement nearest to each wanted step. steps: in increasing order."""
    return np.searchsorted((steps[1:] + steps[:-1]) / 2, wanted).tolist() if len(steps) else []


def layers_by_kind_plot(
    name: str,
    stacks: Mapping[str, Mapping[str, Sequence[float]]],
    *,
    scale_label: str,
    description: str,
    log: bool = True,
) -> Markup | None:
    """Draw values by layer (x) and kind of sublayer (y) as heat maps with a common colour scale, as SVG.

    stacks: for each stack, the first at the bottom, [layers] by kind; NaN, for a layer without a value, is drawn in grey.
    log: use a logarithmic scale, on which values that are 0 or have vanished are black. Returns None if no value can be drawn.
    """
    images = {stack: _rows(list(kinds.values())) for stack, kinds in stacks.items() if any(map(len, kinds.values()))}
    if (scale := ColourScale.of(images.values(), log=log)) is None:
        return None
    with mpl.rc_context(STYLE):
        figure, rows = _stacked([0.45 + 0.32 * len(image) for image in images.values()])
        drawn: list[AxesImage] = []
        for axes, (stack, image) in zip(rows, images.items(), strict=True):
            drawn.append(scale.draw(axes, image, extent=(0.5, image.shape[1] + 0.5, len(image) - 0.5, -0.5)))
            axes.set_yticks(range(len(image)), [shortened(kind) for kind in stacks[stack]])
            axes.set_xlabel(f"{stack} layer")
            axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
        scale.add_bar(figure, drawn, rows, scale_label)
        return to_svg(figure, name, description)


def _stacked(heights: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """Create a figure with axes above each other, the first at the bottom. heights: in inches."""
    figure = Figure(figsize=(SIZE[0], 1.2 + sum(heights)), layout="constrained")
    rows = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": list(heights)[::-1]})
    return figure, list(rows[::-1, 0])


def _rows(values: Sequence[Sequence[float]]) -> np.ndarray:
    """The values as an array [rows, longest row], NaN where there is no finite value."""
    image = np.full((len(values), max(map(len, values), default=0)), math.nan)
    for index, row in enumerate(values):
        image[index, : len(row)] = row
    image[~np.isfinite(image)] = math.nan
    return image
