"""Plots as inline SVG: small enough to be read on a telephone, in colours that the colour-blind can tell apart."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from kilolayer.terminal import printable

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito 2008
MARKERS = "osD^vP"
SIZE = (4.8, 3.0)  # inches; at 100% of a narrow screen its text stays above 9 px
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be searched, and the page stays small
    "font.family": "sans-serif",
    "font.size": 10,
    "text.parse_math": False,  # a dollar sign in a run's text is a dollar sign
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "axes.axisbelow": True,
    "axes.edgecolor": "#777777",
    "lines.linewidth": 1.6,
    "legend.frameon": False,
}
POINTS = 400
DOTS_PER_INCH = 100  # of pictures inside a plot: six of them, of a thousand layers each, stay below 2 MB
LABEL = 24  # characters of a label: a longer one would leave no room for the plot
DECADES = 6  # that the colours of a picture tell apart, below its largest value


@dataclass(frozen=True)
class Series:
    """One line of a plot; a y that is not finite leaves a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def line_plot(
    name: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    description: str,
    log: bool = False,
    from_zero: bool = False,
    ordered: bool = False,
) -> Markup | None:
    """Lines over x as SVG; None where no series has a finite value.

    name: unique on the page. log: a logarithmic y axis, where all values allow it. from_zero: the y axis begins at 0.
    ordered: the series are one quantity at rising times, coloured from dark to light rather than as different things.
    """
    drawn = [(_shortened(each.name), *_thinned(each)) for each in series]
    drawn = [(label, x, y) for label, x, y in drawn if np.isfinite(y).any()]
    if not drawn:
        return None
    with mpl.rc_context(STYLE):
        figure, axes = _axes(x_label, y_label)
        colours = _shades(len(drawn)) if ordered else PALETTE
        for index, (label, x, y) in enumerate(drawn):
            few = np.isfinite(y).sum() <= 24
            marker = MARKERS[index % len(MARKERS)] if few else None
            axes.plot(x, y, color=colours[index % len(colours)], label=label, marker=marker, markersize=3.5)
        finite = np.concatenate([y[np.isfinite(y)] for _, _, y in drawn])
        if log and (finite > 0).all():
            _logarithmic(axes, finite)
        elif from_zero and (finite >= 0).all():
            axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if len(drawn) > 1:
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(len(drawn), 3), handlelength=1.4)
        return _svg(figure, name, description)


def bar_plot(
    name: str, labels: Sequence[str], values: Sequence[float], *, x_label: str, y_label: str, description: str
) -> Markup | None:
    """A bar with its number for each label as SVG; None where no value is finite, a gap where one is not."""
    heights = np.array(values, dtype=float)
    if not np.isfinite(heights).any():
        return None
    with mpl.rc_context(STYLE):
        figure, axes = _axes(x_label, y_label)
        places = np.flatnonzero(np.isfinite(heights))
        bars = axes.bar(places, heights[places], color=PALETTE[0], width=0.7)
        axes.bar_label(bars, labels=[f"{height:.3g}" for height in heights[places]], fontsize=8, padding=1)
        shown = [_shortened(label) for label in labels]
        axes.set_xticks(range(len(labels)), shown, rotation=30 if max(map(len, shown)) * len(shown) > 40 else 0)
        axes.set_xlim(-0.6, len(labels) - 0.4)
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.1)
        return _svg(figure, name, description)


def heat_plot(
    name: str, rows: Sequence[str], values: Sequence[Sequence[float]], *, x_label: str, scale_label: str, description: str
) -> Markup | None:
    """Rows of cells as SVG, dark where a value is low; None where no value is finite. Columns are counted from 1."""
    cells = np.array(values, dtype=float)
    if not np.isfinite(cells).any():
        return None
    with mpl.rc_context(STYLE):
        figure, axes = _axes(x_label, "")
        image = axes.imshow(cells, aspect="auto", cmap="viridis", interpolation="nearest", vmin=0.0)
        image.set_extent((0.5, cells.shape[1] + 0.5, len(rows) - 0.5, -0.5))
        shown = range(0, len(rows), -(-len(rows) // 12))
        axes.set_yticks(list(shown), [_shortened(rows[place]) for place in shown])
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.grid(visible=False)
        figure.colorbar(image, label=scale_label)
        return _svg(figure, name, description)


def layers_by_step_plot(
    name: str,
    steps: Sequence[float],
    stacks: Mapping[str, Sequence[Sequence[float]]],
    *,
    scale_label: str,
    description: str,
) -> Markup | None:
    """Positive values by layer (upwards) and step as pictures with one logarithmic colour scale, as SVG.

    stacks: [steps][layers] for each, the first at the bottom; NaN where there is no value, which is drawn in grey.
    None where no value is positive. More than POINTS steps are thinned evenly.
    """
    kept = sorted({round(place) for place in np.linspace(0, len(steps) - 1, min(len(steps), POINTS))}) if steps else []
    images = {stack: _by_layer([columns[place] for place in kept]) for stack, columns in stacks.items()}
    positive = np.concatenate([image[image > 0] for image in images.values()] or [np.empty(0)])
    if not positive.size:
        return None
    high = np.log10(positive.max())
    low = min(max(np.log10(positive.min()), high - DECADES), high - math.log10(2))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(SIZE[0], 1.2 + 1.9 * len(images)), layout="constrained")
        rows = figure.subplots(len(images), 1, sharex=True, squeeze=False)[::-1, 0]
        drawn, below = None, False
        for axes, (stack, image) in zip(rows, images.items(), strict=True):
            shades = np.log10(np.where(image > 0, image, np.where(np.isnan(image), math.nan, 10 ** (low - 1))))
            extent = (-0.5, image.shape[1] - 0.5, 0.5, image.shape[0] + 0.5)
            colours = mpl.colormaps["viridis"].with_extremes(bad="#cccccc", under="#000000")
            drawn = axes.imshow(shades, cmap=colours, vmin=low, vmax=high, aspect="auto", origin="lower", extent=extent)
            below |= bool((shades < low).any())
            axes.set_ylabel(f"{stack} layer")
            axes.yaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
            axes.grid(visible=False)
        ticks = sorted({round(place) for place in np.linspace(0, len(kept) - 1, min(len(kept), 5))})
        rows[0].set_xticks(ticks, [f"{int(steps[kept[place]]):,}" for place in ticks])
        rows[0].set_xlabel("step")
        assert drawn is not None
        bar = figure.colorbar(drawn, ax=list(rows), label=scale_label, extend="min" if below else "neither")
        bar.locator = MaxNLocator(5, integer=high - low > 2)
        bar.formatter = FuncFormatter(lambda power, _: f"{10**power:.2g}")
        bar.update_ticks()
        return _svg(figure, name, description)


def _by_layer(columns: Sequence[Sequence[float]]) -> np.ndarray:
    """[layers, steps], NaN where a step has no finite value for a layer."""
    image = np.full((max(map(len, columns)), len(columns)), math.nan)
    for place, column in enumerate(columns):
        image[: len(column), place] = column
    image[~np.isfinite(image)] = math.nan
    return image


def _shortened(label: str) -> str:
    label = printable(label)
    return label if len(label) <= LABEL else f"{label[: LABEL - 3]}..."


def _axes(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE, layout="constrained")  # no pyplot: no global state, no display
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure, axes


def _logarithmic(axes: Axes, values: np.ndarray) -> None:
    """A logarithmic y axis with plain numbers; within one power of ten its ticks stand at round numbers."""
    axes.set_yscale("log")
    if values.max() < 10 * values.min():
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _shades(count: int) -> list[tuple[float, ...]]:
    return [tuple(colour) for colour in mpl.colormaps["viridis"](np.linspace(0.0, 0.85, count))]


def _thinned(series: Series) -> tuple[np.ndarray, np.ndarray]:
    """The series in at most about POINTS points; of each stretch the lowest and the highest stay, so that no spike is lost."""
    x, y = np.array(series.x, dtype=float), np.array(series.y, dtype=float)
    y[~np.isfinite(y)] = math.nan
    if len(x) <= POINTS:
        return x, y
    kept = {0, len(x) - 1}
    for stretch in np.array_split(np.arange(len(x)), POINTS // 2):
        filled = stretch[np.isfinite(y[stretch])]
        kept |= {int(filled[y[filled].argmin()]), int(filled[y[filled].argmax()])} if len(filled) else {int(stretch[0])}
    order = sorted(kept)
    return x[order], y[order]


def _svg(figure: Figure, name: str, description: str) -> Markup:
    """The figure as an element for an HTML page: it scales, names itself, and shares no id with another plot.

    The only text that goes into a page as markup: matplotlib escapes the texts inside it, and `description` is escaped here.
    """
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # of a label: a browser has more letters than matplotlib's font
        figure.savefig(buffer, format="svg", dpi=DOTS_PER_INCH, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'\sid="', f' id="{name}-', text)
    text = re.sub(r"(url\(|href=\")#", rf"\1#{name}-", text)
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    opening = f'<svg {box[0]} role="img" aria-label="{escape(description)}">'
    return Markup(re.sub(r"<svg\b[^>]*>", lambda _: opening, text, count=1).replace("xlink:href", "href").strip())
