"""What a task adds to the report of a run: sections of its own, and what it finds wrong with a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kilolayer.report.panel import Panel
from kilolayer.report.record import Entry, Record
from kilolayer.report.table import Table
from kilolayer.tasks.registry import Registration


@dataclass(frozen=True)
class TitledTable:
    """A table under a heading, which may be empty."""

    title: str
    table: Table


@dataclass(frozen=True)
class Section:
    """A section of the page: a heading, sentences, plots and tables."""

    title: str
    texts: list[str] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)
    tables: list[TitledTable] = field(default_factory=list)


class TaskReport:
    """The part of a task that adds nothing. A registration names a subclass by its path: `report="my_module:MyReport"`."""

    def sections(self, record: Record, prefix: str) -> list[Section]:
        """Sections from the contents of a run folder, which may be incomplete and may come from someone else.

        prefix: of the names of plots, which are unique on a page.
        """
        return []

    def faults(self, valid: Sequence[Entry], train: Sequence[Entry]) -> list[str]:
        """What is wrong with a trained model, from the rows of its validations and its training; in comparisons too."""
        return []


def task_report(task: Registration | None) -> TaskReport:
    """The part of a task; of an unknown task, one that adds nothing."""
    return TaskReport() if task is None else task.load_report()()
