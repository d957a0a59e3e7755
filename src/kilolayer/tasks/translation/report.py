"""What a translator adds to the report: scores by direction, and where the errors are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kilolayer.evaluate.source_use import unread_source
from kilolayer.report.bars import bar_plot
from kilolayer.report.numbers import show_number
from kilolayer.report.panel import Panel
from kilolayer.report.record import Entry, Record, number
from kilolayer.report.table import Table
from kilolayer.report.task_report import Section, TaskReport, TitledTable

MOST_BUCKETS = 50
ERRORS = "Where the errors are"


class TranslatorReport(TaskReport):
    """Scores by direction, word accuracy by training frequency, and BLEU by sentence length."""

    def sections(self, record: Record, prefix: str) -> list[Section]:
        found = [_languages(record.valid), _errors(record.scores, prefix)]
        return [each for each in found if each is not None]

    def faults(self, valid: Sequence[Entry], train: Sequence[Entry]) -> list[str]:
        unread = unread_source(valid, train)
        return [] if unread is None else [unread]


def _languages(valid: Sequence[Entry]) -> Section | None:
    """Loss and BLEU of each direction at the last validation that measured them; None if there is none."""
    measured = [entry for entry in valid if isinstance(entry.get("directions"), dict) and entry["directions"]]
    if not measured:
        return None
    last = measured[-1]
    rows = [
        [name, *(show_number(number(last, "directions", name, key)) for key in ("loss", "bleu"))] for name in last["directions"]
    ]
    table = TitledTable("", Table(["direction", "loss", "BLEU"], rows))
    return Section("Languages", [f"Validation at step {int(last['step']):,}."], tables=[table])


def _errors(scores: dict[str, Any], prefix: str) -> Section | None:
    """For one direction, a plot of each; for several, a table of each with a row per direction and a column per bucket.

    None if scores.json has no such data. prefix: of the plots' names.
    """
    if isinstance(scores.get("frequency_buckets"), dict):
        found = [
            _by_direction(scores, "frequency_buckets", "f1", "Word accuracy (F1) by training frequency"),
            _by_direction(scores, "length_buckets", "bleu", "BLEU by words in the reference"),
        ]
        tables = [each for each in found if each is not None]
        return Section(ERRORS, tables=tables) if tables else None
    frequency, length = _buckets(scores.get("frequency_buckets")), _buckets(scores.get("length_buckets"))
    accuracy = bar_plot(
        f"{prefix}by-frequency",
        [str(bucket.get("label", "")) for bucket in frequency],
        [number(bucket, "f1") for bucket in frequency],
        x_label="times seen in training",
        y_label="F1",
        description="Word accuracy by frequency in the training text",
    )
    bleu = bar_plot(
        f"{prefix}by-length",
        [str(bucket.get("label", "")) for bucket in length],
        [number(bucket, "bleu") for bucket in length],
        x_label="words in the reference",
        y_label="BLEU",
        description="BLEU by sentence length",
    )
    frequency_columns = {"matched": "matched", "reference": "in reference", "hypothesis": "in hypothesis", "f1": "F1"}
    length_columns = {"sentences": "sentences", "bleu": "BLEU"}
    words = "F1 of the words in the hypothesis against those in the reference."
    panels = [
        Panel(accuracy, "Word accuracy by training frequency", words, _numbers(frequency, frequency_columns)),
        Panel(bleu, "BLEU by sentence length", numbers=_numbers(length, length_columns)),
    ]
    return Section(ERRORS, panels=panels) if any(panel.svg is not None for panel in panels) else None


def _by_direction(scores: dict[str, Any], key: str, value: str, title: str) -> TitledTable | None:
    parts = scores.get(key)
    rows = {name: _buckets(buckets) for name, buckets in parts.items()} if isinstance(parts, dict) else {}
    if not any(rows.values()):
        return None
    header = ["", *(str(bucket.get("label", "")) for bucket in next(filter(None, rows.values())))]
    cells = [[name, *(show_number(number(bucket, value)) for bucket in buckets)] for name, buckets in rows.items()]
    return TitledTable(title, Table(header, cells))


def _buckets(buckets: Any) -> list[Entry]:
    return [bucket for bucket in buckets if isinstance(bucket, dict)][:MOST_BUCKETS] if isinstance(buckets, list) else []


def _numbers(buckets: Sequence[Entry], columns: dict[str, str]) -> Table:
    rows = [[str(bucket.get("label", "")), *(show_number(number(bucket, key)) for key in columns)] for bucket in buckets]
    return Table(["", *columns.values()], rows)
