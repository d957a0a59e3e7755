"""The grid of a comparison as inline SVG: one cell per pair of values, darker if better, hatched if runs died."""

from __future__ import annotations

import textwrap

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize, to_hex, to_rgb
from matplotlib.patches import Rectangle

from kilolayer.report.comparison_view import FATAL, Grid, GridCell
from kilolayer.report.figure import STYLE, new_axes, shortened, to_svg
from kilolayer.terminal import printable

CELL = (1.15, 0.52)  # inches
MARGIN = (1.7, 0.9)  # inches for the colour scale and the labels
LETTER = 0.085  # width in inches of a letter in a row's name
LETTERS, LINES = 17, 3  # letters per line, and lines, of a cell's text
BLUES = LinearSegmentedColormap.from_list("grid", mpl.colormaps["Blues"](np.linspace(0.08, 0.95, 256)))


def grid_plot(name: str, grid: Grid) -> Markup | None:
    """Draw the grid, coloured by the metric; None without cells. A cell without a value, or whose runs died, has only text."""
    if not any(cell for row in grid.cells for cell in row):
        return None
    values = [cell.value for row in grid.cells for cell in row if cell is not None and _counts(cell)]
    across, down = len(grid.columns), len(grid.rows)
    names = LETTER * max(len(shortened(row)) for row in grid.rows)
    size = (MARGIN[0] + names + CELL[0] * across, MARGIN[1] + CELL[1] * down)
    with mpl.rc_context({**STYLE, "hatch.linewidth": 0.6, "hatch.color": "#b5b5b5"}):
        figure, axes = new_axes(shortened(grid.column_name), shortened(grid.row_name), size)
        scale = _scale(grid, [value for value in values if value is not None])
        for row, cells in enumerate(grid.cells):
            for column, cell in enumerate(cells):
                if cell is not None:
                    _draw(axes, row, column, cell, scale)
        axes.set_xlim(-0.5, across - 0.5)
        axes.set_ylim(down - 0.5, -0.5)
        axes.set_xticks(range(across), [shortened(column) for column in grid.columns])
        axes.set_yticks(range(down), [shortened(row) for row in grid.rows])
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        if scale is not None:
            bar = figure.colorbar(
                scale, ax=axes, label=f"{shortened(grid.metric)}, darker is better", fraction=0.05, aspect=8 * down
            )
            bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
        return to_svg(figure, name, f"{grid.metric} by {grid.row_name} and {grid.column_name}")


def _counts(cell: GridCell) -> bool:
    return cell.value is not None and bool(np.isfinite(cell.value)) and cell.outcome not in FATAL


def _scale(grid: Grid, values: list[float]) -> ScalarMappable | None:
    if not values:
        return None
    low, high = min(values), max(values)
    colours = BLUES if grid.larger_is_better else BLUES.reversed()
    return ScalarMappable(Normalize(low, high if high > low else low + 1e-6 * max(abs(low), 1.0)), colours)


def _draw(axes: Axes, row: int, column: int, cell: GridCell, scale: ScalarMappable | None) -> None:
    colour, ink, hatch = "#ffffff", "#444444", None
    if _counts(cell) and scale is not None:
        colour = to_hex(scale.to_rgba(np.array([cell.value]))[0])
        ink = "#ffffff" if _brightness(colour) < 0.5 else "#111111"
    elif cell.outcome in FATAL:
        colour, ink, hatch = "#f1f1f1", "#111111", "////"
    corner = (column - 0.48, row - 0.46)
    axes.add_patch(Rectangle(corner, 0.96, 0.92, facecolor=colour, edgecolor="#b5b5b5", linewidth=0.6, hatch=hatch))
    plate = {"facecolor": colour, "edgecolor": "none", "pad": 1.0} if hatch else None
    axes.text(column, row, _wrapped(cell.text), ha="center", va="center", color=ink, fontsize=8, bbox=plate, clip_on=True)


def _wrapped(text: str) -> str:
    lines = [part for line in printable(text).split("\n") for part in textwrap.wrap(line, LETTERS)]
    return "\n".join(lines if len(lines) <= LINES else [*lines[: LINES - 1], f"{lines[LINES - 1][: LETTERS - 3]}..."])


def _brightness(colour: str) -> float:
    red, green, blue = to_rgb(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue
