"""What the page of a comparison shows, as plain data: whoever compares fills it in, and the page knows no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kilolayer.report.facts import Fact
from kilolayer.report.table import Table

Value = str | int | float | bool | None
Points = Sequence[tuple[float, float]]
FINISHED = "finished"
FATAL = ("diverged", "dead", "no_progress", "failed")
"""Kinds of outcome that make a run's numbers none to compare by."""


@dataclass(frozen=True)
class ViewAxis:
    """An option that differs between the runs: its dotted name, or "layers", and its values in the order to show them."""

    name: str
    values: Sequence[Value]


@dataclass(frozen=True)
class ViewRun:
    """One run.

    options: values by dotted name, at least of every axis. outcome: a kind, such as "finished" or "diverged"; outcome_text: as
    a user reads it. curves: (step, value) by metric, in the order of steps; "loss" is of training, "valid" of validation, a
    value that is not finite leaves a gap. scores: numbers of the test or of the best validation by name.
    """

    name: str
    options: Mapping[str, Value] = field(default_factory=dict)
    outcome: str = FINISHED
    outcome_text: str = "finished"
    curves: Mapping[str, Points] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GridCell:
    """The best of the runs that share a row and a column: its value where it has one, the text in the cell, its outcome."""

    value: float | None
    text: str
    outcome: str = FINISHED


@dataclass(frozen=True)
class Grid:
    """Cells by two axes: cells[row][column], None where there is no run."""

    metric: str
    row_name: str
    rows: Sequence[str]
    column_name: str
    columns: Sequence[str]
    cells: Sequence[Sequence[GridCell | None]]
    larger_is_better: bool = False


@dataclass(frozen=True)
class ComparisonView:
    """The page's contents. table: cells as text, with spread and outcome in words; table_note says what is in them.

    facts: tiles at the top, without dates. commands: what made the comparison, a line each. notes: sentences.
    """

    title: str
    runs: Sequence[ViewRun]
    axes: Sequence[ViewAxis] = ()
    grid: Grid | None = None
    table: Table | None = None
    table_note: str = ""
    facts: Sequence[Fact] = ()
    commands: Sequence[str] = ()
    notes: Sequence[str] = ()
