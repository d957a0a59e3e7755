"""Shared by all plots: style, colours for the colour-blind, labels, thinning of series, and output as SVG or PNG."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from kilolayer.display import svg_document
from kilolayer.report.numbers import show_number
from kilolayer.terminal import printable

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito 2008
MARKERS = "osD^vP"
DASHES: tuple[tuple[int, ...], ...] = ((), (5, 2), (1, 1))  # of the first lines, then of those that repeat a colour
SIZE = (4.8, 3.0)  # inches; as wide as a narrow screen, its text is still above 9 px
PAPER, INK, LINE = "#fffffe", "#1d1d1e", "#e3e3e4"
"""Background, text and grid. No other colour has these values, so that `to_svg` can hand them to the page."""
OF_THE_PAGE = {PAPER: "var(--paper, #ffffff)", INK: "var(--ink, #1d1d1f)", LINE: "var(--line, #e3e3e3)"}
STYLE: dict[Any, Any] = {
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "svg.fonttype": "none",  # text stays text: it can be searched, and the page stays small
    "font.family": "sans-serif",
    "font.size": 10,
    "text.parse_math": False,  # a dollar sign in a run's text is a dollar sign
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": LINE,
    "axes.axisbelow": True,
    "axes.edgecolor": "#777777",
    "lines.linewidth": 1.6,
    "legend.frameon": False,
}
LEGEND: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "handlelength": 1.4}  # above the plot
POINTS = 400  # maximum number of points of a line
TICKS = 8  # maximum number of ticks that are at the values themselves
DOTS_PER_INCH = 100  # of images inside a plot: six images of a thousand layers each take less than 2 MB
LABEL = 24  # maximum number of characters of a label: a longer one would leave no room for the plot


@dataclass(frozen=True)
class Series:
    """One line of a plot; a y that is not finite leaves a gap.

    colour: None to choose it by the position among the other lines. dash: alternating lengths of line and gap in pixels; empty
    for a solid line.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str | None = None
    dash: tuple[int, ...] = ()


def shortened(label: str) -> str:
    """Shorten a label so that it leaves room for the plot, and escape control characters."""
    label = printable(label)
    return label if len(label) <= LABEL else f"{label[: LABEL - 3]}..."


def new_axes(x_label: str, y_label: str, size: tuple[float, float] = SIZE) -> tuple[Figure, Axes]:
    """Create a figure with one pair of axes. size: in inches."""
    figure = Figure(figsize=size, layout="constrained")  # no pyplot: no global state, no display
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure, axes


def logarithmic(axes: Axes, values: np.ndarray) -> None:
    """Make the y axis logarithmic, with plain numbers; within one power of ten, its ticks are at round numbers."""
    axes.set_yscale("log")
    if values.max() < 10 * values.min():
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def ticks_at_values(axes: Axes, x: np.ndarray, *, log: bool) -> None:
    """Put the ticks of the x axis at the values of x if they are few. log: make it logarithmic if all are positive."""
    if log and (x > 0).all():
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    values = np.unique(x)
    if len(values) <= TICKS:
        axes.xaxis.set_major_locator(FixedLocator(list(values)))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: show_number(value)))


def shades(count: int, lightest: float = 0.85) -> list[str]:
    """Colours from dark to light, for one quantity at increasing values."""
    return [to_hex(colour) for colour in mpl.colormaps["viridis"](np.linspace(0.0, lightest, count))]


def thinned(series: Series, most: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Reduce a series to about `most` points: the lowest and the highest of each stretch are kept, so that no spike is lost."""
    x, y = np.array(series.x, dtype=float), np.array(series.y, dtype=float)
    y[~np.isfinite(y)] = math.nan
    if len(x) <= most:
        return x, y
    rows = split_into_stretches(y, most // 2)
    # In a stretch with only gaps, the first is both the lowest and the highest, so that one gap is kept.
    lowest, highest = np.where(np.isnan(rows), math.inf, rows).argmin(1), np.where(np.isnan(rows), -math.inf, rows).argmax(1)
    begins = np.arange(rows.shape[0]) * rows.shape[1]
    kept = np.unique(np.concatenate([[0, len(y) - 1], begins + lowest, begins + highest]))
    kept = kept[kept < len(y)]
    return x[kept], y[kept]


def split_into_stretches(values: np.ndarray, count: int) -> np.ndarray:
    """Split the values into stretches of equal width, the last padded with NaN: [values] to [count, width]."""
    count = max(count, 1)
    width = -(-len(values) // count)
    return np.pad(values, (0, count * width - len(values)), constant_values=math.nan).reshape(count, width)


def to_svg(figure: Figure, name: str, description: str, *, light: bool = False) -> Markup:
    """The figure as an SVG element for an HTML page: scalable, with an accessible description, and with ids unique on the page.

    Background, text and grid have the colours of the page. light: the background stays light on a dark page, for lines that are
    too dark for it.

    Its text enters the page as markup: matplotlib escapes the texts inside it; `description` is escaped here.
    """
    buffer = io.StringIO()
    with mpl.rc_context({**STYLE, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # of a label: browsers have more glyphs than matplotlib's font
        figure.savefig(buffer, format="svg", dpi=DOTS_PER_INCH, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'\sid="', f' id="{name}-', text)
    text = re.sub(r"(url\(|href=\")#", rf"\1#{name}-", text)
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    for colour, of_the_page in OF_THE_PAGE.items():
        text = text.replace(colour, of_the_page)
    kind = ' class="light"' if light else ""
    opening = f'<svg {box[0]}{kind} role="img" aria-label="{escape(description)}">'
    return Markup(re.sub(r"<svg\b[^>]*>", lambda _: opening, text, count=1).replace("xlink:href", "href").strip())


def as_file(svg: Markup) -> str:
    """The SVG element as the text of a file, with the XML namespace that a file needs."""
    return f"{svg_document(svg)}\n"


def to_png(figure: Figure) -> bytes:
    """The figure as PNG, for programs that do not read SVG."""
    buffer = io.BytesIO()
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        figure.savefig(buffer, format="png", dpi=2 * DOTS_PER_INCH, metadata={"Software": None})
    return buffer.getvalue()
