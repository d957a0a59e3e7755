"""The contents of a comparison's HTML page."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kilolayer.compare.advice import advice_on, next_steps
from kilolayer.compare.answers import answers
from kilolayer.compare.comparison import Comparison
from kilolayer.compare.flat_options import common_options
from kilolayer.compare.grid import LAYERS, RECIPE, SEED, Setting, axes_of, shown_value
from kilolayer.compare.measure import Measure
from kilolayer.compare.result import Result
from kilolayer.compare.table import Cell, ComparisonTable
from kilolayer.compare.verdicts import Verdict
from kilolayer.files.paths import kind_of
from kilolayer.report.comparison_view import FATAL, ComparisonView, Grid, GridCell, Value, ViewAxis, ViewRun
from kilolayer.report.facts import Fact
from kilolayer.report.record import Entry, number
from kilolayer.terminal import counted

CURVES = {"loss": "nll", "grad_norm": "grad_norm", "lr": "lr"}
"""The training curves: the page's name of each, and its key in the metrics."""
TOLD = (RECIPE, LAYERS, "model.dim", "train.steps", "train.lr", "train.warmup_steps", SEED)
"""Options that are named at the top of the page if all runs share them."""


def view_of(
    comparison: Comparison, results: Sequence[Result], table: ComparisonTable, verdicts: Sequence[Verdict]
) -> ComparisonView:
    """Everything that the page shows."""
    axes = [axis for axis in axes_of(result.options for result in results) if len(axis.values) > 1]
    shared = common_options([result.config for result in results if result.config])
    return ComparisonView(
        title=f"Comparison {comparison.folder.name}",
        summary=_summary(results, shared),
        runs=[_run(result, results, table.measures, comparison.folder) for result in results],
        axes=[ViewAxis(axis.name, [_plain(axis.name, value) for value in axis.values]) for axis in axes],
        answers=answers(table, verdicts),
        grid=_grid(table, table.measures[0]),
        further_grids=[_grid(table, measure) for measure in table.measures[1:]],
        table_note=_note(table),
        facts=_facts(results, table, table.measures[0]),
        notes=[*map(_sentence, verdicts), *(f"{note}." for note in table.notes)],
        next_steps=next_steps(comparison, results, table),
        shared=[f"{name} = {shown_value(name, value)}" for name, value in shared.items()],
        command=f"kilolayer compare {shlex.quote(str(comparison.folder))}" if comparison.base is not None else "",
    )


def _summary(results: Sequence[Result], shared: Setting) -> str:
    """The number of runs, and the few shared options that say most about them."""
    told = [f"{name.rpartition('.')[2].replace('_', ' ')} {shown_value(name, shared[name])}" for name in TOLD if name in shared]
    task = f" of {shared['task']}" if "task" in shared else ""
    return f"{counted(len(results), 'run')}{task}" + (f", all with {', '.join(told)}" if told else "")


def _run(result: Result, results: Sequence[Result], measures: Sequence[Measure], folder: Path) -> ViewRun:
    curves = {name: _points(result.train, key) for name, key in CURVES.items()}
    curves["valid"] = _points(result.valid, "loss")
    for measure in measures:
        if measure.part == "validation" and measure.key != "loss":
            curves[measure.name] = _points(result.valid, measure.key)
    return ViewRun(
        name=result.name,
        options={name: _plain(name, value) for name, value in result.options.items()},
        outcome=result.outcome.kind,
        outcome_text=result.outcome.text,
        curves={name: points for name, points in curves.items() if points},
        scores={each.title: value for each in measures if not math.isnan(value := each.of(result)) and each.key != "loss"},
        report=_address(result.folder / "report.html", folder),
        advice=advice_on(result, results) if result.outcome.kind in FATAL else "",
    )


def _address(path: Path, folder: Path) -> str:
    """The address of a file relative to a page in `folder`; empty if there is no such file."""
    return quote(os.fsencode(os.path.relpath(path, folder))) if kind_of(path) == "file" else ""


def _points(rows: Sequence[Entry], key: str) -> list[tuple[float, float]]:
    return [(float(row["step"]), number(row, key)) for row in rows] if any(key in row for row in rows) else []


def _plain(name: str, value: Any) -> Value:
    """A value that the page can map to a colour; depths of two stacks, lists and tables become text."""
    if isinstance(value, bool | int | float):
        return value
    return shown_value(name, value) if name != LAYERS else str(value)


def _grid(table: ComparisonTable, measure: Measure) -> Grid:
    def shown(cell: Cell | None) -> GridCell | None:
        if cell is None:
            return None
        spread = cell.best.spread(measure)
        kind = "finished" if spread is not None else cell.best.results[0].outcome.kind
        return GridCell(None if spread is None else spread.mean, cell.text(measure), kind)

    columns = [""] if table.columns is None else [shown_value(table.columns.name, each) for each in table.columns.values]
    row_name, column_name = ("" if axis is None else axis.name.rpartition(".")[2] for axis in (table.rows, table.columns))
    return Grid(
        metric=measure.title,
        row_name=row_name,
        rows=[table.row_title(row) for row in table.row_values],
        column_name=column_name,
        columns=columns,
        cells=[[shown(table.cell(row, column)) for column in table.column_values] for row in table.row_values],
        larger_is_better=measure.larger_is_better,
    )


def _note(table: ComparisonTable) -> str:
    most = max((cell.tried for cell in table.cells), default=0)
    chosen = f"Each cell is the best of up to {most} settings, by {table.chosen_by.title}." if most > 1 else ""
    spread = any(len(cell.best.results) > 1 for cell in table.cells)
    return " ".join(filter(None, [chosen, "± is the standard deviation over seeds." if spread else ""]))


def _facts(results: Sequence[Result], table: ComparisonTable, measure: Measure) -> list[Fact]:
    died = sum(result.outcome.died for result in results)
    finished = sum(result.outcome.kind == "finished" for result in results)
    facts = [Fact("finished", f"{finished} of {len(results)}"), Fact("died", str(died))]
    best = table.best()
    return facts if best is None else [Fact("best", best.text(measure), f"{table.title_of(best)}, {measure.title}"), *facts]


def _sentence(verdict: Verdict) -> str:
    return f"{verdict.title} ({verdict.run}) against {verdict.best}: {verdict.significance}."
