"""The section about errors: word accuracy by training frequency, and BLEU by sentence length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kilolayer.report.bars import bar_plot
from kilolayer.report.numbers import show_number
from kilolayer.report.panel import Panel
from kilolayer.report.record import Entry, number
from kilolayer.report.table import Table

MOST_BUCKETS = 50


@dataclass(frozen=True)
class TitledTable:
    """A table under a heading."""

    title: str
    table: Table


@dataclass(frozen=True)
class ErrorsSection:
    """For one direction, a plot of each; for several, a table of each with a row per direction and a column per bucket."""

    panels: list[Panel] = field(default_factory=list)
    tables: list[TitledTable] = field(default_factory=list)


def errors_section(scores: dict[str, Any], prefix: str = "") -> ErrorsSection:
    """Build the section from scores.json; empty if it has no such data. prefix: of the plots' names."""
    if isinstance(scores.get("frequency_buckets"), dict):
        found = [
            _by_direction(scores, "frequency_buckets", "f1", "Word accuracy (F1) by training frequency"),
            _by_direction(scores, "length_buckets", "bleu", "BLEU by words in the reference"),
        ]
        return ErrorsSection(tables=[each for each in found if each is not None])
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
    return ErrorsSection(
        panels=[
            Panel(accuracy, "Word accuracy by training frequency", words, _numbers(frequency, frequency_columns)),
            Panel(bleu, "BLEU by sentence length", numbers=_numbers(length, length_columns)),
        ]
    )


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
