"""The contents of a comparison's HTML page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kilolayer.compare.comparison import Comparison
from kilolayer.compare.grid import LAYERS, axes_of, shown_value
from kilolayer.compare.measure import Measure
from kilolayer.compare.result import Result
from kilolayer.compare.table import Cell, ComparisonTable
from kilolayer.compare.verdicts import Verdict
from kilolayer.report.comparison_view import ComparisonView, Grid, GridCell, Value, ViewAxis, ViewRun
from kilolayer.report.facts import Fact
from kilolayer.report.record import Entry, number
from kilolayer.report.table import Table

CURVES = {"loss": "nll", "grad_norm": "grad_norm", "lr": "lr"}
"""The training curves: the page's name of each, and its key in the metrics."""


def view_of(
    comparison: Comparison, results: Sequence[Result], table: ComparisonTable, verdicts: Sequence[Verdict]
) -> ComparisonView:
    """Everything that the page shows."""
    axes = [axis for axis in axes_of(result.options for result in results) if len(axis.values) > 1]
    measure = table.measures[0]
    return ComparisonView(
        title=f"Comparison {comparison.folder.name}",
        runs=[_run(result, table.measures) for result in results],
        axes=[ViewAxis(axis.name, [_plain(axis.name, value) for value in axis.values]) for axis in axes],
        grid=_grid(table, measure) if table.rows is not None else None,
        table=Table(table.header(measure), table.lines(measure)),
        table_note=_note(table, measure),
        facts=_facts(results, table, measure),
        commands=[f"kilolayer compare {comparison.folder}"] if comparison.base is not None else [],
        notes=[*map(_sentence, verdicts), *(f"{note}." for note in table.notes)],
    )


def _run(result: Result, measures: Sequence[Measure]) -> ViewRun:
    curves = {name: _points(result.train, key) for name, key in CURVES.items()}
    curves["valid"] = _points(result.valid, "loss")
    for measure in measures:
        if measure.part == "validation" and measure.key != "loss":
            curves[measure.key] = _points(result.valid, measure.key)
    return ViewRun(
        name=result.name,
        options={name: _plain(name, value) for name, value in result.options.items()},
        outcome=result.outcome.kind,
        outcome_text=result.outcome.text,
        curves={name: points for name, points in curves.items() if points},
        scores={each.title: value for each in measures if not math.isnan(value := each.of(result)) and each.key != "loss"},
    )


def _points(rows: Sequence[Entry], key: str) -> list[tuple[float, float]]:
    return [(float(row["step"]), number(row, key)) for row in rows] if any(key in row for row in rows) else []


def _plain(name: str, value: Any) -> Value:
    """A value that the page can map to a colour; depths of two stacks, lists and tables become text."""
    if isinstance(value, bool | int | float):
        return value
    return shown_value(name, value) if name != LAYERS else str(value)


def _grid(table: ComparisonTable, measure: Measure) -> Grid:
    assert table.rows is not None

    def shown(cell: Cell | None) -> GridCell | None:
        if cell is None:
            return None
        spread = cell.best.spread(measure)
        kind = "finished" if spread is not None else cell.best.results[0].outcome.kind
        return GridCell(None if spread is None else spread.mean, cell.text(measure), kind)

    columns = [""] if table.columns is None else [shown_value(table.columns.name, each) for each in table.columns.values]
    return Grid(
        metric=measure.title,
        row_name=table.rows.name,
        rows=[table.row_title(row) for row in table.rows.values],
        column_name="" if table.columns is None else table.columns.name,
        columns=columns,
        cells=[[shown(table.cell(row, column)) for column in table.column_values] for row in table.rows.values],
        larger_is_better=measure.larger_is_better,
    )


def _note(table: ComparisonTable, measure: Measure) -> str:
    most = max((cell.tried for cell in table.cells), default=0)
    chosen = f" Each cell is the best of up to {most} settings, by {table.chosen_by.title}."
    spread = any(len(cell.best.results) > 1 for cell in table.cells)
    seeds = " ± is the standard deviation over seeds."
    return f"{measure.title[:1].upper()}{measure.title[1:]}." + (chosen if most > 1 else "") + (seeds if spread else "")


def _facts(results: Sequence[Result], table: ComparisonTable, measure: Measure) -> list[Fact]:
    died = sum(result.outcome.died for result in results)
    finished = sum(result.outcome.kind == "finished" for result in results)
    facts = [Fact("finished", f"{finished} of {len(results)}"), Fact("died", str(died))]
    best = table.best()
    return facts if best is None else [Fact("best", best.text(measure), f"{table.title_of(best)}, {measure.title}"), *facts]


def _sentence(verdict: Verdict) -> str:
    return f"{verdict.title} ({verdict.run}) against {verdict.best}: {verdict.significance}."
