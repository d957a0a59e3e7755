"""The table of a comparison: a cell by recipe and depth, or by other two options, each the best setting of all others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from kilolayer.compare.choice import by_setting, rank
from kilolayer.compare.comparison import Comparison
from kilolayer.compare.grid import LAYERS, RECIPE, RUN, SEED, TASK, Axis, Setting, same, shown_value
from kilolayer.compare.measure import Measure, measures_of
from kilolayer.compare.result import Result

WORDS = {"no_progress": "without progress"}


@dataclass(frozen=True)
class Spread:
    """A measure over the runs of a setting that differ in the seed alone. deviation: None of one run."""

    mean: float
    deviation: float | None
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None where there is no value."""
        found = tuple(value for value in values if not math.isnan(value))
        return cls(fmean(found), stdev(found) if len(found) > 1 else None, found) if found else None


@dataclass(frozen=True)
class Candidate:
    """Runs that differ in the seed alone. options: what they share, without rows and columns."""

    options: Setting
    results: tuple[Result, ...]

    @property
    def alive(self) -> list[Result]:
        """Those that came to their end in good health."""
        return [result for result in self.results if result.outcome.kind == "finished"]

    def spread(self, measure: Measure) -> Spread | None:
        """Of the runs that are alive."""
        return Spread.of([measure.of(result) for result in self.alive])

    def rank(self, measure: Measure) -> tuple[float, float, float]:
        """By the rule of choice.py; the smaller, the better."""
        return rank([result.outcome.kind for result in self.results], [measure.cost_of(result) for result in self.results])


@dataclass(frozen=True)
class Cell:
    """The best of the settings that share a row and a column. settings: the other options of all that were tried."""

    row: Any
    column: Any
    best: Candidate
    settings: tuple[Setting, ...]

    @property
    def tried(self) -> int:
        return len(self.settings)

    def text(self, measure: Measure) -> str:
        """Mean and spread over seeds, and what became of the others; without any, what became of all."""
        others = [result for result in self.best.results if result.outcome.kind != "finished"]
        spread = self.best.spread(measure)
        if spread is None:
            return _fate(others) if others else "-"
        shown = measure.show(spread.mean)
        if spread.deviation is not None:
            shown += f" ± {measure.show(spread.deviation)}"
        return shown + (f" ({_fate(others, len(self.best.results))})" if others else "")


@dataclass(frozen=True)
class ComparisonTable:
    """rows, columns: the axes of the cells, None where there is but one. chosen_by: what the best of a cell is chosen by.

    measures: those that are told, the task's own first.
    """

    rows: Axis | None
    columns: Axis | None
    cells: tuple[Cell, ...]
    chosen_by: Measure
    measures: tuple[Measure, ...]
    notes: tuple[str, ...] = ()

    def cell(self, row: Any, column: Any) -> Cell | None:
        """None where there is no run."""
        return next((each for each in self.cells if same({"": each.row, "-": each.column}, {"": row, "-": column})), None)

    @property
    def row_values(self) -> tuple[Any, ...]:
        return (None,) if self.rows is None else self.rows.values

    @property
    def column_values(self) -> tuple[Any, ...]:
        return (None,) if self.columns is None else self.columns.values

    def header(self, measure: Measure) -> list[str]:
        """Titles of the columns."""
        if self.columns is None:
            return [self._row_title, measure.title]
        return [self._row_title, *(_titled(self.columns, value) for value in self.columns.values)]

    def lines(self, measure: Measure) -> list[list[str]]:
        """A line a row, its name first."""
        return [
            [
                self.row_title(row),
                *((cell.text(measure) if (cell := self.cell(row, each)) else "") for each in self.column_values),
            ]
            for row in self.row_values
        ]

    def row_title(self, value: Any) -> str:
        return "all" if self.rows is None else shown_value(self.rows.name, value)

    def best(self) -> Cell | None:
        """Of all cells, chosen as within one; None where none is alive, or where they are of several tasks."""
        if self.rows is not None and self.rows.name == TASK and len(self.rows.values) > 1:
            return None
        alive = [cell for cell in self.cells if cell.best.spread(self.chosen_by) is not None]
        return min(alive, key=lambda cell: cell.best.rank(self.chosen_by), default=None)

    def title_of(self, cell: Cell) -> str:
        """The row and the column in words."""
        parts = [
            _titled(axis, value) for axis, value in ((self.rows, cell.row), (self.columns, cell.column)) if axis is not None
        ]
        return " ".join(parts) or "all"

    @property
    def _row_title(self) -> str:
        return "" if self.rows is None else self.rows.name.rpartition(".")[2]


def tabulate(comparison: Comparison, results: Sequence[Result] | None = None) -> ComparisonTable:
    """The table of a comparison as it stands."""
    results = comparison.results() if results is None else results
    axes = [axis for axis in comparison.axes if axis.name != SEED]
    rows, columns = _main(axes)
    others = [axis for axis in axes if axis not in (rows, columns)]
    headline = None if comparison.task is None else comparison.task.headline
    chosen_by, measures = measures_of(results, headline)
    cells = []
    for row in (None,) if rows is None else rows.values:
        for column in (None,) if columns is None else columns.values:
            at = {axis.name: value for axis, value in ((rows, row), (columns, column)) if axis is not None}
            own = [result for result in results if same(at, {name: result.options.get(name) for name in at})]
            candidates = [
                Candidate({axis.name: options.get(axis.name) for axis in others}, tuple(runs))
                for options, runs in by_setting(own, lambda result: result.options)
            ]
            if candidates:
                best = min(candidates, key=lambda each: each.rank(chosen_by))
                cells.append(Cell(row, column, best, tuple(each.options for each in candidates)))
    table = ComparisonTable(rows, columns, tuple(cells), chosen_by, measures)
    return replace(table, notes=tuple(_edges(table)))


def _titled(axis: Axis, value: Any) -> str:
    """A value with the name of its option, where it does not tell itself what it is."""
    plain = shown_value(axis.name, value)
    return plain if axis.name in (RECIPE, LAYERS, RUN) else f"{axis.name.rpartition('.')[2]} {plain}"


def _main(axes: Sequence[Axis]) -> tuple[Axis | None, Axis | None]:
    """Rows and columns: of the options that have several values, recipe and depth first, but tasks before all.

    So no cell holds runs of several tasks, of which none is the better one.
    """
    usual = [TASK, RECIPE, LAYERS]

    def order(axis: Axis) -> tuple[bool, int]:
        return len(axis.values) == 1, usual.index(axis.name) if axis.name in usual else len(usual)

    first, second, *_ = [*sorted(axes, key=order), None, None]
    return first, second


def _fate(results: Sequence[Result], of: int | None = None) -> str:
    """What became of runs that did not finish, in few words: of one its text, of several how many."""
    if of is None and len(results) == 1:
        return results[0].outcome.text
    total = len(results) if of is None else of
    kinds = dict.fromkeys(result.outcome.kind for result in results)
    counted = {kind: sum(result.outcome.kind == kind for result in results) for kind in kinds}
    return ", ".join(f"{count} of {total} {WORDS.get(kind, kind)}" for kind, count in counted.items())


def _edges(table: ComparisonTable) -> list[str]:
    """Where a best value is the smallest or the largest that was tried in its cell: a better one may lie beyond."""
    notes = []
    for cell in table.cells:
        for name, value in cell.best.options.items():
            numbers = {setting[name] for setting in cell.settings if _is_number(setting.get(name))}
            if cell.best.alive and len(numbers) > 1 and _is_number(value) and value in (min(numbers), max(numbers)):
                edge = "smallest" if value == min(numbers) else "largest"
                title, shown = table.title_of(cell), shown_value(name, value)
                notes.append(f"{title}: its best {name}, {shown}, is the {edge} that was tried")
    return notes


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_json(table: ComparisonTable) -> dict[str, Any]:
    """The table as plain values."""

    def told(spread: Spread | None) -> Mapping[str, Any] | None:
        return None if spread is None else {"mean": spread.mean, "deviation": spread.deviation, "values": spread.values}

    def name(measure: Measure) -> str:
        return f"{measure.part} {measure.key}"

    return {
        "rows": None if table.rows is None else table.rows.name,
        "columns": None if table.columns is None else table.columns.name,
        "chosen_by": name(table.chosen_by),
        "cells": [
            {
                "row": cell.row,
                "column": cell.column,
                "options": cell.best.options,
                "tried": cell.tried,
                "runs": [result.name for result in cell.best.results],
                "outcomes": [result.outcome.text for result in cell.best.results],
                "measures": {name(measure): told(cell.best.spread(measure)) for measure in table.measures},
                "text": {name(measure): cell.text(measure) for measure in table.measures},
            }
            for cell in table.cells
        ],
        "notes": list(table.notes),
    }
