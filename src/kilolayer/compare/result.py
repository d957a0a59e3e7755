"""A run of a comparison and its result. Only the run's own folder shows whether anything is left to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kilolayer.compare.grid import Setting
from kilolayer.compare.outcome import Outcome, ended_by_divergence, ended_by_forecast, outcome_of
from kilolayer.errors import InputError
from kilolayer.files.paths import kind_of
from kilolayer.files.reading import read_json
from kilolayer.report.record import Entry, Record, number, read_record


@dataclass(frozen=True)
class Member:
    """One run of a comparison: its name, the values of the options that vary, and its folder."""

    name: str
    options: Setting
    folder: Path


@dataclass(frozen=True)
class Result:
    """The result of a run so far.

    train, valid, stacks: rows of its metrics. scores, config: the contents of its scores.json and config.toml.
    """

    name: str
    options: Setting
    folder: Path
    outcome: Outcome
    train: list[Entry] = field(default_factory=list)
    valid: list[Entry] = field(default_factory=list)
    stacks: list[Entry] = field(default_factory=list)
    scores: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None


def record_of(member: Member) -> Record | None:
    """The record of a run's folder; None if the run has not begun."""
    names = ("config.toml", "metrics.jsonl", "scores.json")
    begun = any(kind_of(member.folder / name) == "file" for name in names)
    return read_record(member.folder) if begun else None


def is_complete(member: Member) -> bool:
    """Whether nothing is left to do for a run: it has scores, or was ended by divergence or the forecast of it."""
    path = member.folder / "scores.json"
    if kind_of(path) == "file":
        return _holds_scores(path)
    record = record_of(member)
    return record is not None and (ended_by_divergence(record) or ended_by_forecast(record)) is not None


def _holds_scores(path: Path) -> bool:
    try:
        found = read_json(path)
    except InputError:
        return False
    return isinstance(found, dict) and bool(found)


def result_of(member: Member, failure: str | None = None) -> Result:
    """The current result of a run. failure: why its process failed, if it did."""
    record = record_of(member)
    outcome = outcome_of(record, failure)
    if record is None:
        return Result(member.name, member.options, member.folder, outcome)
    seconds = number(record.train[-1], "seconds") if record.train else None
    rows = (record.train, record.valid, record.stacks)
    return Result(member.name, member.options, member.folder, outcome, *rows, record.scores, record.config, seconds)
