"""What the templates lay out: plots with their titles, and tables; and the plots of a run's training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kilolayer.report.plots import Series, line_plot
from kilolayer.report.record import Entry, Record, number


@dataclass(frozen=True)
class Table:
    """Cells as text: a name in the first column, numbers in the others."""

    header: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Panel:
    """A plot with its title, a line under the title, and the numbers that the plot shows."""

    svg: Markup | None
    title: str
    note: str = ""
    numbers: Table | None = None


def training_panels(record: Record) -> list[Panel]:
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
    return [
        Panel(loss, "Loss", "Both without label smoothing." if plain else ""),
        Panel(bleu, "BLEU on the validation set"),
        Panel(bits, "Bits per byte on the validation set"),
        Panel(gradient, "Gradient norm", _clipping(train)),
        Panel(rate, "Learning rate"),
        Panel(speed, "Speed"),
    ]


def series_of(name: str, entries: Sequence[Entry], key: str) -> Series:
    """The numbers of `key` by step."""
    return Series(name, [number(entry, "step") for entry in entries], [number(entry, key) for entry in entries])


def _curve(name: str, entries: Sequence[Entry], key: str, label: str, description: str, *, log: bool = False) -> Markup | None:
    series = [series_of(label, entries, key)]
    return line_plot(name, series, x_label="step", y_label=label, description=description, log=log, from_zero=True)


def _clipping(train: Sequence[Entry]) -> str:
    """How often the gradient was clipped; every entry counts the steps since the one before."""
    clipped = sum(count for entry in train if math.isfinite(count := number(entry, "clipped")))
    return f"Clipped in {int(clipped):,} of {int(train[-1]['step']):,} steps." if clipped else ""
