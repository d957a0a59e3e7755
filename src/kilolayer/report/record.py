"""Reads the contents of a run folder leniently: files may be missing, and the run may still be in progress."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kilolayer import hints
from kilolayer.config import parse_toml
from kilolayer.errors import InputError, KilolayerError
from kilolayer.files.paths import kind_of, resolve
from kilolayer.files.reading import parse_json, read_bytes
from kilolayer.report.metric_rows import read_rows
from kilolayer.tasks import registry
from kilolayer.tasks.registry import Registration

LARGEST, SMALLEST = 1e30, 1e-100
"""Plots show no numbers outside this range."""
Entry = dict[str, Any]
KINDS = ("train", "valid", "layers", "stacks", "routing", "event", "reference")


@dataclass(frozen=True)
class Record:
    """The contents of a run folder; missing files are empty. notes: messages about what could not be read."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    train: list[Entry] = field(default_factory=list)
    valid: list[Entry] = field(default_factory=list)
    layers: list[Entry] = field(default_factory=list)
    stacks: list[Entry] = field(default_factory=list)
    routing: list[Entry] = field(default_factory=list)
    event: list[Entry] = field(default_factory=list)
    reference: list[Entry] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    scores: dict[str, Any] = field(default_factory=dict)
    samples: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def task(self) -> Registration | None:
        """The registration of the run's task; None if the task is unknown here."""
        return task_of(self.config)

    @property
    def headline_title(self) -> str:
        """The title of the run's headline score, as in scores.json, since a run may choose its metric."""
        if self.task is None or (headline := self.task.headline) is None:
            return ""
        entries = (table.get(headline.key) for table in self.scores.values() if isinstance(table, dict))
        names = (entry.get("name") for entry in entries if isinstance(entry, dict))
        return next((name for name in names if isinstance(name, str) and name), headline.title)


def task_of(config: dict[str, Any]) -> Registration | None:
    """The registration of the task that the contents of a config.toml name; None if the task is unknown here."""
    try:
        return registry.get(config.get("task", registry.DEFAULT))
    except KilolayerError:
        return None


def read_record(run: Path) -> Record:
    """Read the record of a run folder; raises if it is not a run folder."""
    made = f"give a folder that `{hints.verb('train')}` created"
    if kind_of(run) != "folder":
        raise InputError("the run folder does not exist", where=str(run), fix=made)
    if not any(kind_of(run / name) == "file" for name in ("config.toml", "metrics.jsonl", "scores.json")):
        raise InputError(
            "not a run folder: it has neither config.toml, metrics.jsonl nor scores.json",
            where=str(run),
            fix=made,
        )
    notes: list[str] = []
    config_text = _text(run / "config.toml", notes)
    scores = _parsed(run / "scores.json", parse_json, notes)
    samples = _parsed(run / "samples.json", parse_json, notes)
    return Record(
        name=resolve(run).name,
        config=_parsed(run / "config.toml", parse_toml, notes) or {},
        config_text=config_text,
        **_metrics(run / "metrics.jsonl", notes),
        log=_text(run / "log.txt", []).rstrip("\n").split("\n"),
        scores=scores if isinstance(scores, dict) else {},
        samples=[sample for sample in samples if isinstance(sample, dict)] if isinstance(samples, list) else [],
        notes=notes,
    )


def number(entry: Entry, *path: str) -> float:
    """The number at `path` inside an entry; NaN if there is none, or if it is too large to come from training."""
    value: Any = entry
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= LARGEST:
        return math.nan
    return float(value) if abs(value) >= SMALLEST else 0.0


def _text(path: Path, notes: list[str]) -> str:
    try:
        if kind_of(path) is not None:
            return read_bytes(path).decode("utf-8", errors="replace")
        notes.append(f"{path.name} is missing.")
    except InputError as error:
        notes.append(f"{path.name} is left out: {error.what}.")
    return ""


def _parsed(path: Path, parse: Callable[[str], Any], notes: list[str]) -> Any:
    """Parse a file; None if it is missing, or if it cannot be parsed, which adds a note."""
    if not (text := _text(path, [])):
        return None
    try:
        return parse(text)
    except ValueError as error:
        notes.append(f"{path.name} cannot be read: {error}.")
        return None


def _metrics(path: Path, notes: list[str]) -> dict[str, list[Entry]]:
    """The entries of metrics.jsonl by kind, in the order of their steps.

    A resumed run writes the steps after its checkpoint again: a step that is not greater than the last one read replaces all
    entries from that step on. Events are kept, since each of them happened.
    """
    found: dict[str, list[Entry]] = {kind: [] for kind in KINDS}
    if not path.exists():
        notes.append(f"{path.name} is missing.")
        return found
    try:
        metrics = read_rows(path)
    except InputError as error:
        notes.append(f"{path.name} cannot be read: {error.what}.")
        return found
    if metrics.warning is not None:
        notes.append(f"{metrics.warning[0].upper()}{metrics.warning[1:]}.")
    if metrics.cut:
        notes.append("The last line of metrics.jsonl is incomplete: the run was stopped while writing it, or is still writing.")
    for entry in metrics.rows:
        if entry["kind"] not in KINDS or not number(entry, "step") >= 0:
            continue
        kept = found[entry["kind"]]
        while entry["kind"] != "event" and kept and kept[-1]["step"] >= entry["step"]:
            kept.pop()
        kept.append(entry)
    return found
