"""The contents of a comparison's page as plain data, so that the page does not depend on how runs are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kilolayer.report.facts import Fact

Value = str | int | float | bool | None
Points = Sequence[tuple[float, float]]
FINISHED = "finished"
FATAL = ("diverged", "dead", "no_progress", "failed")
"""Outcomes after which a run's numbers must not be compared."""


@dataclass(frozen=True)
class ViewAxis:
    """An option that differs between runs: its dotted name, or "layers", and its values in display order."""

    name: str
    values: Sequence[Value]


@dataclass(frozen=True)
class ViewRun:
    """One run.

    options: values by dotted name, at least those of every axis. outcome: a kind, such as "finished" or "diverged";
    outcome_text: the same in words. curves: (step, value) by metric, in the order of steps; "loss" is the training loss and
    "valid" the validation loss; a value that is not finite leaves a gap. scores: of the test or the best validation, by name.
    report: the address of its own report, relative to the page; empty if there is none. advice: what to do if it went wrong.
    """

    name: str
    options: Mapping[str, Value] = field(default_factory=dict)
    outcome: str = FINISHED
    outcome_text: str = "finished"
    curves: Mapping[str, Points] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)
    report: str = ""
    advice: str = ""


@dataclass(frozen=True)
class GridCell:
    """The best run of a row and a column: its value, if it has one, the text in the cell, and its outcome."""

    value: float | None
    text: str
    outcome: str = FINISHED


@dataclass(frozen=True)
class Grid:
    """Cells by two axes: cells[row][column], None if there is no run."""

    metric: str
    row_name: str
    rows: Sequence[str]
    column_name: str
    columns: Sequence[str]
    cells: Sequence[Sequence[GridCell | None]]
    larger_is_better: bool = False


@dataclass(frozen=True)
class NextStep:
    """Something to do next, with the command that does it."""

    text: str
    command: str


@dataclass(frozen=True)
class ComparisonView:
    """The contents of the page.

    summary: what all runs have in common, under the title. answers: sentences that say which run is best, and how deep. facts:
    tiles, without dates. grid: cells by the first measure; further_grids: by the others; table_note explains them.
    notes: sentences. next_steps: what to do now. shared: the options that all runs have, one per line. command: the one that
    shows or continues the comparison.
    """

    title: str
    runs: Sequence[ViewRun]
    axes: Sequence[ViewAxis] = ()
    summary: str = ""
    answers: Sequence[str] = ()
    facts: Sequence[Fact] = ()
    grid: Grid | None = None
    further_grids: Sequence[Grid] = ()
    table_note: str = ""
    notes: Sequence[str] = ()
    next_steps: Sequence[NextStep] = ()
    shared: Sequence[str] = ()
    command: str = ""
