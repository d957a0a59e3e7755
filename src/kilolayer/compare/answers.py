"""Which setting of a comparison is best, and how deep each of them goes, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from kilolayer.compare.grid import LAYERS, TASK, Axis, shown_value
from kilolayer.compare.table import Cell, ComparisonTable
from kilolayer.compare.verdicts import Verdict

MOST_NAMED = 8
"""Cells that a sentence names; of more it gives the number, and the notes of the page name them."""


def answers(table: ComparisonTable, verdicts: Sequence[Verdict]) -> list[str]:
    """The best cell, which others differ from it, and for each recipe the best depth and the depths without a finished run."""
    if not any(cell.best.alive for cell in table.cells):
        return ["No run has finished yet." if any(map(_is_open, table.cells)) else "No run has finished."]
    return [*_best(table, verdicts), *_depths(table)]


def _best(table: ComparisonTable, verdicts: Sequence[Verdict]) -> list[str]:
    best, measure = table.best(), table.measures[0]
    if best is None:
        tasks = table.rows is not None and table.rows.name == TASK
        return ["The runs are of different tasks, so none of them is the best."] if tasks else []
    chosen = "" if measure == table.chosen_by else f", chosen by {table.chosen_by.title}"
    if len(table.cells) == 1:
        return [f"{_capital(measure.title)} {best.text(measure)}{chosen}."]
    so_far = "Best so far" if any(map(_is_open, table.cells)) else "Best"
    found = [f"{so_far}: {table.title_of(best)}, {measure.title} {best.text(measure)}{chosen}."]
    for mark, text in (
        ("=", "Not significantly different from it"),
        ("-", "Significantly worse"),
        ("+", "Significantly better"),
    ):
        titles = [each.title for each in verdicts if each.significance.verdict == mark]
        share = "all" if len(titles) == len(verdicts) else f"{len(titles)} of the"
        named = ", ".join(titles) if len(titles) <= MOST_NAMED else f"{share} {len(verdicts)} others"
        found += [f"{text}: {named}."] if titles else []
    return found


def _depths(table: ComparisonTable) -> list[str]:
    depths, other = (table.columns, table.rows) if _is_depth(table.columns) else (table.rows, table.columns)
    if depths is None or not _is_depth(depths):
        return []
    found = []
    for value in (None,) if other is None else other.values:
        pairs = [(value, depth) if depths is table.columns else (depth, value) for depth in depths.values]
        cells = [cell for pair in pairs if (cell := table.cell(*pair)) is not None]
        name = "" if other is None else f"{shown_value(other.name, value)}: "
        if sentence := _one(table, depths, cells):
            found.append(f"{name}{sentence}" if name else _capital(sentence))
    return found


def _one(table: ComparisonTable, depths: Axis, cells: Sequence[Cell]) -> str:
    """The best depth of these cells, and those at which no run finished; empty if there is nothing to tell yet."""

    def depth(cell: Cell) -> str:
        return shown_value(LAYERS, cell.column if depths is table.columns else cell.row)

    alive = [cell for cell in cells if cell.best.alive]
    lost = [depth(cell) for cell in cells if not cell.best.alive and not _is_open(cell)]
    if not alive:
        return f"no run finished at {' or '.join(lost)}." if lost else ""
    best = min(alive, key=lambda cell: cell.best.rank(table.chosen_by))
    text = f"best at {depth(best)}" if len(alive) > 1 else f"finished at {depth(best)}"
    return f"{text}; no run finished at {' or '.join(lost)}." if lost else f"{text}."


def _is_depth(axis: Axis | None) -> bool:
    return axis is not None and axis.name == LAYERS and len(axis.values) > 1


def _is_open(cell: Cell) -> bool:
    return any(result.outcome.kind in ("waiting", "unfinished") for result in cell.best.results)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
