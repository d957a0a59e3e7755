"""Tables of a comparison in HTML: the better a cell, the more colour it has; hatched if its runs died."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kilolayer.report.comparison_view import FATAL, Grid, GridCell


@dataclass(frozen=True)
class ShadedCell:
    """A cell of a table. share: from 0 for the worst value of the table to 1 for the best; None without a value."""

    text: str
    share: float | None = None
    is_fatal: bool = False


@dataclass(frozen=True)
class ShadedTable:
    """A table whose better cells have more colour. corner: the title of the first column; columns: of the others, if any."""

    title: str
    corner: str
    columns: list[str]
    rows: list[tuple[str, list[ShadedCell]]]


def shaded(grid: Grid) -> ShadedTable:
    """The cells of a grid, coloured by their values; those whose runs died have no share."""
    every = [cell for row in grid.cells for cell in row if cell is not None]
    values = [cell.value for cell in every if cell.value is not None and math.isfinite(cell.value)]
    worst, best = (min, max) if grid.larger_is_better else (max, min)
    low, high = worst(values, default=0.0), best(values, default=0.0)

    def shown(cell: GridCell | None) -> ShadedCell:
        if cell is None:
            return ShadedCell("")
        fatal = cell.outcome in FATAL
        if fatal or cell.value is None or not math.isfinite(cell.value):
            return ShadedCell(cell.text, None, fatal)
        return ShadedCell(cell.text, (cell.value - low) / (high - low) if high != low else None)

    by = " and ".join(filter(None, [grid.row_name, grid.column_name]))
    title = f"{grid.metric[:1].upper()}{grid.metric[1:]}" + (f" by {by}" if by else "")
    rows = [(name, [shown(cell) for cell in row]) for name, row in zip(grid.rows, grid.cells, strict=True)]
    return ShadedTable(title, grid.row_name, list(grid.columns) if grid.column_name else [], rows)
