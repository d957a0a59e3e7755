"""The parts of the page that are plots: a run's curves and its errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from kilolayer.report.markup import folded, folded_if_long, show_number, table
from kilolayer.report.plots import Series, bar_plot, line_plot
from kilolayer.report.record import Entry, Record, number


@dataclass(frozen=True)
class Panel:
    """A plot with its title, a line under it, and below the plot whatever HTML `details` holds."""

    svg: str
    title: str
    note: str = ""
    details: str = ""


def curves(record: Record) -> str:
    """Loss, BLEU or bits per byte, gradient norm, learning rate and speed by step."""
    train, valid = record.train, record.valid
    plain = any(math.isfinite(number(entry, "nll")) for entry in train)
    loss = line_plot(
        "loss",
        [series_of("training", train, "nll" if plain else "loss"), series_of("validation", valid, "loss")],
        x_label="step",
        y_label="loss, nats a token",
        description="Training and validation loss by step",
    )
    bleu = _curve("bleu", valid, "bleu", "BLEU", "Validation BLEU by step")
    bits = _curve("bits", valid, "bits_per_byte", "bits per byte", "Validation bits per byte by step")
    rate = _curve("rate", train, "lr", "learning rate", "Learning rate by step")
    gradient = _curve("gradient-norm", train, "grad_norm", "gradient norm", "Norm of the whole gradient by step", log=True)
    speed = _curve("speed", train, "tokens_per_second", "tokens a second", "Tokens a second by step")
    return grid(
        Panel(loss, "Loss", "Both without label smoothing." if plain else ""),
        Panel(bleu, "BLEU on the validation set"),
        Panel(bits, "Bits per byte on the validation set"),
        Panel(gradient, "Gradient norm", _clipping(train)),
        Panel(rate, "Learning rate"),
        Panel(speed, "Speed"),
    )


def _curve(name: str, entries: Sequence[Entry], key: str, label: str, description: str, *, log: bool = False) -> str:
    series = [series_of(label, entries, key)]
    return line_plot(name, series, x_label="step", y_label=label, description=description, log=log, from_zero=True)


def _clipping(train: Sequence[Entry]) -> str:
    """How often the gradient was clipped; every entry counts the steps since the one before."""
    clipped = sum(count for entry in train if math.isfinite(count := number(entry, "clipped")))
    return f"Clipped in {int(clipped):,} of {int(train[-1]['step']):,} steps." if clipped else ""


def errors(scores: dict[str, Any]) -> str:
    """Word accuracy by training frequency and BLEU by sentence length, each as a plot with its table; tables of directions."""
    if isinstance(scores.get("frequency_buckets"), dict):
        return _by_direction(scores, "frequency_buckets", "f1", "Word accuracy (F1) by times seen in training") + _by_direction(
            scores, "length_buckets", "bleu", "BLEU by words of the reference"
        )
    frequency, length = _buckets(scores.get("frequency_buckets")), _buckets(scores.get("length_buckets"))
    accuracy = bar_plot(
        "by-frequency",
        [str(bucket.get("label", "")) for bucket in frequency],
        [number(bucket, "f1") for bucket in frequency],
        x_label="times seen in training",
        y_label="F1",
        description="Word accuracy by frequency in the training text",
    )
    bleu = bar_plot(
        "by-length",
        [str(bucket.get("label", "")) for bucket in length],
        [number(bucket, "bleu") for bucket in length],
        x_label="words of the reference",
        y_label="BLEU",
        description="BLEU by sentence length",
    )
    frequency_columns = {"matched": "matched", "reference": "in reference", "hypothesis": "in hypothesis", "f1": "F1"}
    length_columns = {"sentences": "sentences", "bleu": "BLEU"}
    return grid(
        Panel(
            accuracy,
            "Word accuracy by training frequency",
            "F1 of the words that hypothesis and reference share.",
            _numbers(frequency, frequency_columns),
        ),
        Panel(bleu, "BLEU by sentence length", "", _numbers(length, length_columns)),
    )


def _by_direction(scores: dict[str, Any], key: str, value: str, title: str) -> str:
    """A row a direction, a column a bucket."""
    parts = scores.get(key)
    rows = {name: _buckets(buckets) for name, buckets in parts.items()} if isinstance(parts, dict) else {}
    if not any(rows.values()):
        return ""
    header = ["", *(str(bucket.get("label", "")) for bucket in next(filter(None, rows.values())))]
    cells = [[name, *(show_number(number(bucket, value)) for bucket in buckets)] for name, buckets in rows.items()]
    return f"<h3>{escape(title)}</h3>\n{folded_if_long(header, cells)}"


def _buckets(buckets: Any) -> list[Entry]:
    return [bucket for bucket in buckets if isinstance(bucket, dict)] if isinstance(buckets, list) else []


def _numbers(buckets: Sequence[Entry], columns: dict[str, str]) -> str:
    """The buckets' numbers, folded away: the plot says the same at a glance."""
    rows = [[str(bucket.get("label", "")), *(show_number(number(bucket, key)) for key in columns)] for bucket in buckets]
    return folded("numbers", table(["", *columns.values()], rows))


def grid(*panels: Panel) -> str:
    """The panels side by side, as many as the screen is wide; those without a plot are left out."""
    figures = [
        f"<figure><figcaption>{escape(panel.title)}{f'<small>{escape(panel.note)}</small>' if panel.note else ''}</figcaption>"
        f"{panel.svg}{panel.details}</figure>"
        for panel in panels
        if panel.svg
    ]
    return '<div class="plots">\n' + "\n".join(figures) + "\n</div>" if figures else ""


def series_of(name: str, entries: Sequence[Entry], key: str) -> Series:
    """The numbers of `key` by step."""
    return Series(name, [number(entry, "step") for entry in entries], [number(entry, key) for entry in entries])
