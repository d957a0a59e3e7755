"""The table of a comparison: a cell for each recipe and depth (or two other options), with the best of the other settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from kilolayer.compare.choice import by_setting, rank
from kilolayer.compare.comparison import Comparison
from kilolayer.compare.grid import LAYERS, RECIPE, RUN, SEED, TASK, Axis, Setting, axes_of, same, shown_value
from kilolayer.compare.measure import VALIDATION_LOSS, Measure, measures_of
from kilolayer.compare.result import Result
from kilolayer.report.record import task_of
from kilolayer.report.task_report import task_report

WORDS = {"no_progress": "without progress"}


@dataclass(frozen=True)
class Spread:
    """The mean and spread of a measure over runs that differ only in the seed. deviation: None for a single run."""

    mean: float
    deviation: float | None
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """The spread of these values; None if there are none."""
        found = tuple(value for value in values if not math.isnan(value))
        return cls(fmean(found), stdev(found) if len(found) > 1 else None, found) if found else None


@dataclass(frozen=True)
class Candidate:
    """Runs that differ only in the seed. options: those that they share, except for the row's and the column's."""

    options: Setting
    results: tuple[Result, ...]

    @property
    def alive(self) -> list[Result]:
        """The runs that finished in good health."""
        return [result for result in self.results if result.outcome.kind == "finished"]

    def spread(self, measure: Measure) -> Spread | None:
        """The spread of a measure over the runs that are alive."""
        return Spread.of([measure.of(result) for result in self.alive])

    def rank(self, measure: Measure) -> tuple[float, float, float]:
        """The sort key of choice.py; smaller is better."""
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
        """The mean and spread over seeds, and the outcome of runs that did not finish; if none did, only the latter.

        A score of 0 is shown with the validation loss, which tells such runs apart.
        """
        others = [result for result in self.best.results if result.outcome.kind != "finished"]
        spread = self.best.spread(measure)
        if spread is None:
            return _unfinished_text(others) if others else "-"
        shown = measure.show(spread.mean)
        if spread.deviation is not None:
            shown += f" ± {measure.show(spread.deviation)}"
        if measure.is_zero(spread.mean) and (loss := self.best.spread(VALIDATION_LOSS)) is not None:
            shown += f", {VALIDATION_LOSS.title} {VALIDATION_LOSS.show(loss.mean)}"
        return shown + (f" ({_unfinished_text(others, len(self.best.results))})" if others else "")


@dataclass(frozen=True)
class Edge:
    """An option whose best value in a cell is the smallest or the largest of those tried there: a better one may lie beyond."""

    cell: Cell
    name: str
    value: float
    values: tuple[float, ...]

    @property
    def is_largest(self) -> bool:
        return self.value == max(self.values)


@dataclass(frozen=True)
class ComparisonTable:
    """rows, columns: the axes of the cells, None if there is only one. chosen_by: the measure the best of a cell is chosen by.

    measures: those that are reported, the task's own first unless it is 0 for all runs.
    """

    rows: Axis | None
    columns: Axis | None
    cells: tuple[Cell, ...]
    chosen_by: Measure
    measures: tuple[Measure, ...]
    notes: tuple[str, ...] = ()

    def cell(self, row: Any, column: Any) -> Cell | None:
        """The cell of a row and a column; None if it has no runs."""
        return next((each for each in self.cells if same({"": each.row, "-": each.column}, {"": row, "-": column})), None)

    @property
    def row_values(self) -> tuple[Any, ...]:
        return (None,) if self.rows is None else self.rows.values

    @property
    def column_values(self) -> tuple[Any, ...]:
        return (None,) if self.columns is None else self.columns.values

    def header(self, measure: Measure) -> list[str]:
        """The column titles."""
        if self.columns is None:
            return [self._row_title, measure.title]
        return [self._row_title, *(_titled(self.columns, value) for value in self.columns.values)]

    def lines(self, measure: Measure) -> list[list[str]]:
        """The rows as text, each with its title first."""
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
        """The best of all cells, by the same rule as within one; None if no run is alive or there are several tasks."""
        if self.rows is not None and self.rows.name == TASK and len(self.rows.values) > 1:
            return None
        alive = [cell for cell in self.cells if cell.best.spread(self.chosen_by) is not None]
        return min(alive, key=lambda cell: cell.best.rank(self.chosen_by), default=None)

    @property
    def edges(self) -> list[Edge]:
        """Every best value of a cell with a finished run that is at the edge of those tried."""
        found = []
        for cell in self.cells:
            for name, value in cell.best.options.items():
                numbers = {setting[name] for setting in cell.settings if _is_number(setting.get(name))}
                if cell.best.alive and len(numbers) > 1 and _is_number(value) and value in (min(numbers), max(numbers)):
                    found.append(Edge(cell, name, value, tuple(numbers)))
        return found

    def title_of(self, cell: Cell) -> str:
        """The row and the column of a cell, for a message."""
        parts = [
            _titled(axis, value) for axis, value in ((self.rows, cell.row), (self.columns, cell.column)) if axis is not None
        ]
        return " ".join(parts) or "all"

    @property
    def _row_title(self) -> str:
        return "" if self.rows is None else self.rows.name.rpartition(".")[2]


def tabulate(comparison: Comparison, results: Sequence[Result] | None = None) -> ComparisonTable:
    """The table of a comparison in its current state."""
    results = comparison.results() if results is None else results
    axes = [axis for axis in axes_of(result.options for result in results) if axis.name != SEED]
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
                Candidate({axis.name: options.get(axis.name) for axis in others}, tuple(_one_per_seed(runs)))
                for options, runs in by_setting(own, lambda result: result.options)
            ]
            if candidates:
                best = min(candidates, key=lambda each: each.rank(chosen_by))
                cells.append(Cell(row, column, best, tuple(each.options for each in candidates)))
    table = ComparisonTable(rows, columns, tuple(cells), chosen_by, measures)
    return replace(table, notes=(*_edges_in_words(table), *_faults(results)))


def _one_per_seed(results: Sequence[Result]) -> list[Result]:
    """Runs of one setting, without those that repeat a seed: added with and without an option, they are the same run twice."""
    kept: list[Result] = []
    for result in results:
        if not any(same(result.options, each.options) for each in kept):
            kept.append(result)
    return kept


def _titled(axis: Axis, value: Any) -> str:
    """A value, with the name of its option unless the value speaks for itself."""
    plain = shown_value(axis.name, value)
    return plain if axis.name in (RECIPE, LAYERS, RUN) else f"{axis.name.rpartition('.')[2]} {plain}"


def _main(axes: Sequence[Axis]) -> tuple[Axis | None, Axis | None]:
    """The axes of rows and columns: of the options with several values, tasks first, then recipe and depth.

    So no cell holds runs of several tasks, which could not be ranked.
    """
    usual = [TASK, RECIPE, LAYERS]

    def order(axis: Axis) -> tuple[bool, int]:
        return len(axis.values) == 1, usual.index(axis.name) if axis.name in usual else len(usual)

    first, second, *_ = [*sorted(axes, key=order), None, None]
    return first, second


def _unfinished_text(results: Sequence[Result], of: int | None = None) -> str:
    """The outcome of runs that did not finish, briefly: the text of a single one, counts of several."""
    if of is None and len(results) == 1:
        return results[0].outcome.text
    total = len(results) if of is None else of
    kinds = dict.fromkeys(result.outcome.kind for result in results)
    counted = {kind: sum(result.outcome.kind == kind for result in results) for kind in kinds}
    return ", ".join(f"{count} of {total} {WORDS.get(kind, kind)}" for kind, count in counted.items())


def _edges_in_words(table: ComparisonTable) -> list[str]:
    """One sentence for each value that is the best of cells and at an end of those tried."""
    groups: dict[tuple[str, str, bool], list[str]] = {}
    for edge in table.edges:
        key = edge.name, shown_value(edge.name, edge.value), edge.is_largest
        groups.setdefault(key, []).append(table.title_of(edge.cell))
    return [
        f"{', '.join(titles)}: {'its' if len(titles) == 1 else 'their'} best {name}, {value}, is the "
        f"{'largest' if largest else 'smallest'} that was tried"
        for (name, value, largest), titles in groups.items()
    ]


def _faults(results: Sequence[Result]) -> list[str]:
    """Notes on what the task finds wrong with finished runs, so that their seeds explain the spread of a cell."""
    return [
        f"{result.name}: {why}"
        for result in results
        if result.outcome.kind == "finished"
        for why in task_report(task_of(result.config)).faults(result.valid, result.train)
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_json(table: ComparisonTable) -> dict[str, Any]:
    """The table as plain values."""

    def numbers(spread: Spread | None) -> Mapping[str, Any] | None:
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
                "measures": {name(measure): numbers(cell.best.spread(measure)) for measure in table.measures},
                "text": {name(measure): cell.text(measure) for measure in table.measures},
            }
            for cell in table.cells
        ],
        "notes": list(table.notes),
    }
