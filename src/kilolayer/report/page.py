"""One HTML page for a run: self-contained, without scripts, readable on a telephone and on paper."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kilolayer.files.writing import write
from kilolayer.report.depth import depth_section, vanished_gradients
from kilolayer.report.errors_section import errors_section
from kilolayer.report.experts_section import expert_faults, experts_section
from kilolayer.report.facts import facts_of
from kilolayer.report.numbers import show_duration, show_number
from kilolayer.report.panels import training_panels
from kilolayer.report.record import Entry, Record, number, read_record
from kilolayer.report.scores_section import scores_section
from kilolayer.report.table import Table
from kilolayer.report.templating import template

SHOWN_EVENTS, SHOWN_SAMPLES, SHOWN_LOG = 40, 30, 60


@dataclass(frozen=True)
class Report:
    """The page, and in words what is wrong with the model."""

    path: Path
    warnings: list[str]


def write_report(run: Path) -> Report:
    """Write report.html into the run folder from what is there by now."""
    record = read_record(run)
    path = run / "report.html"
    # Half a character, which JSON and names of folders may hold, is none of UTF-8's.
    write(path, render(record).encode("utf-8", "backslashreplace"))
    return Report(path, _model_faults(record))


def render(record: Record) -> str:
    """The page of a record."""
    return template("page.html").render(
        name=record.name,
        progress=_progress(record),
        facts=facts_of(record),
        warnings=_warnings(record),
        scores=scores_section(record.scores),
        training=training_panels(record),
        depth=depth_section(record.layers),
        experts=experts_section(record),
        languages=_languages(record.valid),
        samples=_samples(record),
        errors=errors_section(record.scores),
        config_text=record.config_text.strip(),
        log=record.log[-SHOWN_LOG:] if any(record.log[-SHOWN_LOG:]) else [],
    )


def _progress(record: Record) -> str:
    if not record.train:
        return "No training step is recorded yet."
    last = record.train[-1]
    parts = [f"{int(last['step']):,} steps"]
    if math.isfinite(epoch := number(last, "epoch")):
        parts.append(f"{epoch:.3g} epochs")
    if math.isfinite(seconds := number(last, "seconds")):
        parts.append(show_duration(seconds))
    changes = [str(entry.get("text", "")) for entry in record.event if "change" in entry]
    return ". ".join([", ".join(parts), *(f"{text[:1].upper()}{text[1:]}" for text in changes)])


@dataclass(frozen=True)
class Warnings:
    """left_out: how many more there are. is_clean: steps are recorded, and nothing went wrong in them."""

    texts: list[str]
    left_out: int
    is_clean: bool


def _model_faults(record: Record) -> list[str]:
    """Stacks that died, layers that the gradient does not reach, experts that are dead, that take all tokens, or are full."""
    dead = [_event(entry) for entry in record.event if "dead" in entry]
    return [*dead, *vanished_gradients(record.layers), *expert_faults(record)]


def _warnings(record: Record) -> Warnings:
    """What went wrong: faults of the model, unreadable files, skipped steps, events, warnings of the log."""
    first = [*_model_faults(record), *record.notes]
    skipped = [entry for entry in record.event if "skipped" in str(entry.get("text", ""))]
    if skipped:
        first.append(
            f"{len(skipped)} {'step was' if len(skipped) == 1 else 'steps were'} skipped and left no trace in the model."
        )
    events = [_event(entry) for entry in record.event if "dead" not in entry and "change" not in entry]
    events += [line for line in record.log if re.search(r"\b(warning|error)\b", line, re.IGNORECASE)]
    is_clean = not first and not events and bool(record.train)
    return Warnings(first + events[:SHOWN_EVENTS], max(0, len(events) - SHOWN_EVENTS), is_clean)


def _event(entry: Entry) -> str:
    """What happened, with its step."""
    return f"Step {int(entry['step']):,}: {_without_step(str(entry.get('text', '')), entry)}"


def _without_step(text: str, entry: Entry) -> str:
    """The text of an event without the step that it may begin with, which stands before it on the page."""
    return text.removeprefix(f"step {int(entry['step'])}").lstrip(" :,") or text


@dataclass(frozen=True)
class Languages:
    """Scores by direction at one step."""

    step: str
    table: Table


def _languages(valid: Sequence[Entry]) -> Languages | None:
    """Loss and BLEU of each direction at the last validation that measured them."""
    measured = [entry for entry in valid if isinstance(entry.get("directions"), dict) and entry["directions"]]
    if not measured:
        return None
    last = measured[-1]
    rows = [
        [name, *(show_number(number(last, "directions", name, key)) for key in ("loss", "bleu"))] for name in last["directions"]
    ]
    return Languages(f"{int(last['step']):,}", Table(["direction", "loss", "BLEU"], rows))


@dataclass(frozen=True)
class SamplePart:
    """One text of a sample, such as its source."""

    kind: str
    title: str
    text: str


@dataclass(frozen=True)
class Samples:
    """The first samples of a run, and how many more there are."""

    title: str
    blocks: list[list[SamplePart]]
    left_out: int


def _samples(record: Record) -> Samples:
    """With the titles that the task gives them, where it is known."""
    known = None if record.task is None else record.task.samples

    def parts(sample: Entry) -> Mapping[str, str]:
        return known.parts if known is not None else {kind: kind for kind in sample}

    blocks = [
        [SamplePart(kind, title, str(sample[kind])) for kind, title in parts(sample).items() if sample.get(kind) is not None]
        for sample in record.samples[:SHOWN_SAMPLES]
    ]
    title = "Samples" if known is None else known.title
    return Samples(title, blocks, max(0, len(record.samples) - SHOWN_SAMPLES))
