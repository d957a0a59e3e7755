"""The HTML report of one or several runs: self-contained, and readable on a phone, in print and without JavaScript."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kilolayer.evaluate.stack_label import DeadStack, checks_of, dead_stacks
from kilolayer.files.writing import write
from kilolayer.report.depth import depth_section
from kilolayer.report.experts_section import ExpertsSection, expert_faults, experts_section
from kilolayer.report.facts import Fact, facts_of
from kilolayer.report.numbers import show_duration
from kilolayer.report.panel import Ends, Panel
from kilolayer.report.panels import steps_shown, training_panels
from kilolayer.report.record import Entry, Record, number, read_record
from kilolayer.report.samples_section import Samples, samples_section
from kilolayer.report.scores_section import ScoresSection, scores_section
from kilolayer.report.table import Table
from kilolayer.report.task_report import Section, task_report
from kilolayer.report.templating import script, script_json, template
from kilolayer.terminal import counted

SHOWN_EVENTS, SHOWN_LOG = 40, 60
WARNS, VALIDATION = re.compile(r"\b(warning|error)\b", re.IGNORECASE), re.compile(r"step \d+: validation ")
"""Lines of a log that warn; scores of a validation may be errors too."""


@dataclass(frozen=True)
class Report:
    """The path of the report, and warnings about the model."""

    path: Path
    warnings: list[str]


def write_report(run: Path) -> Report:
    """Write report.html to the run folder from its current contents."""
    return write_joint_report([run], run / "report.html")


def write_joint_report(runs: Sequence[Path], path: Path) -> Report:
    """Write one report for several runs: their curves in the same plots, and the details of each run."""
    records = [read_record(run) for run in runs]
    # JSON and folder names may contain lone surrogates, which UTF-8 cannot encode.
    write(path, render(*_distinct(records)).encode("utf-8", "backslashreplace"))
    return Report(path, [fault for record in records for fault in _model_faults(record)])


def render(*records: Record) -> str:
    """Render the report of these records as HTML."""
    ends = steps_shown(records)
    depth, training = depth_section(records, ends), training_panels(records, ends)
    parts = [_part(record, ends, f"run{index}-" if len(records) > 1 else "") for index, record in enumerate(records)]
    panels = [*training, *depth.profiles, *(panel for part in parts for panel in part.panels)]
    text, digest = script("plot.js", "page.js")
    return template("page.html").render(
        name=", ".join(record.name for record in records),
        runs=parts,
        facts=_facts_table(parts),
        training=training,
        depth=depth,
        data=script_json({"charts": [panel.chart for panel in panels if panel.chart is not None]}),
        script=text,
        script_hash=digest,
    )


@dataclass(frozen=True)
class RunPart:
    """The part of the report about one run."""

    name: str
    progress: str
    changes: list[str]
    facts: list[Fact]
    warnings: Warnings
    scores: ScoresSection
    experts: ExpertsSection | None
    sections: list[Section]
    samples: Samples
    config_text: str
    log: list[str]

    @property
    def panels(self) -> list[Panel]:
        """The plots of this part."""
        of_task = [panel for section in self.sections for panel in section.panels]
        return [*(self.experts.panels if self.experts else ()), *of_task]


def _part(record: Record, ends: Ends | None, prefix: str) -> RunPart:
    return RunPart(
        name=record.name,
        progress=_progress(record),
        changes=_changes(record),
        facts=facts_of(record),
        warnings=_warnings(record),
        scores=scores_section(record.scores, None if record.task is None else record.task.headline),
        experts=experts_section(record, ends, prefix),
        sections=task_report(record.task).sections(record, prefix),
        samples=samples_section(record),
        config_text=record.config_text.strip(),
        log=record.log[-SHOWN_LOG:] if any(record.log[-SHOWN_LOG:]) else [],
    )


def _distinct(records: Sequence[Record]) -> list[Record]:
    """The records with unique names: a number is appended to names that occur more than once."""
    names = [record.name for record in records]
    return [
        replace(record, name=f"{record.name} ({names[: index + 1].count(record.name)})")
        if names.count(record.name) > 1
        else record
        for index, record in enumerate(records)
    ]


def _facts_table(parts: Sequence[RunPart]) -> Table:
    """A table with one row per run and one column per fact."""
    columns = list(dict.fromkeys(fact.name for part in parts for fact in part.facts))
    rows = [[part.name, *({fact.name: fact.value for fact in part.facts}.get(name, "-") for name in columns)] for part in parts]
    return Table(["run", *columns], rows)


def _progress(record: Record) -> str:
    if not record.train:
        return "No training steps have been recorded yet."
    last = record.train[-1]
    parts = [counted(int(last["step"]), "step")]
    if math.isfinite(epoch := number(last, "epoch")):
        parts.append(f"{epoch:.3g} epochs")
    if math.isfinite(seconds := number(last, "seconds")):
        parts.append(show_duration(seconds))
    return ", ".join(parts)


def _changes(record: Record) -> list[str]:
    """A sentence for each change of the configuration with which the run was continued."""
    texts = [str(entry.get("text", "")) for entry in record.event if "change" in entry]
    return [f"{text[:1].upper()}{text[1:]}." for text in texts]


@dataclass(frozen=True)
class Warnings:
    """The warnings of a run. left_out: how many more there are. is_clean: steps are recorded, and none went wrong."""

    texts: list[str]
    left_out: int
    is_clean: bool


def _model_faults(record: Record) -> list[str]:
    """Messages about dead stacks, what the task finds wrong, and experts that are dead, collapsed or full."""
    dead = [f"{each.text[:1].upper()}{each.text[1:]}." for each in _dead(record)]
    found = task_report(record.task).faults(record.valid, record.train) if record.scores else []
    return [*dead, *(f"{each[:1].upper()}{each[1:]}." for each in found), *expert_faults(record)]


def _dead(record: Record) -> list[DeadStack]:
    """The stacks that are dead at the end of a finished run."""
    return dead_stacks(checks_of(record.stacks), number(record.config, "train", "lr")) if record.scores else []


def _warnings(record: Record) -> Warnings:
    """Everything that went wrong: faults of the model, unreadable files, skipped steps, events, warnings in the log."""
    events = [entry for entry in record.event if "fading" not in entry and "change" not in entry]
    first = [*_model_faults(record), *record.notes, *_skipped([entry for entry in events if _reason(entry)])]
    rest = [_event(entry) for entry in events if not _reason(entry)]
    rest += [line for line in record.log if WARNS.search(line) and not VALIDATION.match(line)]
    rest = list(dict.fromkeys(rest))
    is_clean = not first and not rest and bool(record.train)
    return Warnings(first + rest[:SHOWN_EVENTS], max(0, len(rest) - SHOWN_EVENTS), is_clean)


def _reason(entry: Entry) -> str:
    """Why a step was skipped; empty for other events."""
    found = re.fullmatch(r"step \d+ skipped: (.+)", str(entry.get("text", "")))
    return found[1] if found else ""


def _skipped(entries: Sequence[Entry]) -> list[str]:
    """A sentence for each reason to skip steps, with the first and the last of them."""
    found: list[str] = []
    for reason in dict.fromkeys(map(_reason, entries)):
        steps = [int(entry["step"]) for entry in entries if _reason(entry) == reason]
        where = f"step {steps[0]:,}" if len(steps) == 1 else f"{len(steps):,} steps, from {steps[0]:,} to {steps[-1]:,},"
        was = "was" if len(steps) == 1 else "were"
        found.append(f"{where[:1].upper()}{where[1:]} {was} skipped without changing the model: {reason}.")
    return found


def _event(entry: Entry) -> str:
    """The text of an event, with its step."""
    return f"Step {int(entry['step']):,}: {_without_step(str(entry.get('text', '')), entry)}"


def _without_step(text: str, entry: Entry) -> str:
    """The text of an event without the step that it may begin with, since the page shows the step before it."""
    return text.removeprefix(f"step {int(entry['step'])}").lstrip(" :,") or text
