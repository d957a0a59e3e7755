"""What the templates lay out: plots with their titles, and tables; and the plots of a run's training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kilolayer.report.figure import Series
from kilolayer.report.plots import line_plot
from kilolayer.report.record import Entry, Record, number
from kilolayer.report.table import Table
from kilolayer.terminal import counted


@dataclass(frozen=True)
class Panel:
    """A plot with its title, a line under the title, and the numbers that the plot shows."""

    svg: Markup | None
    title: str
    note: str = ""
    numbers: Table | None = None


def training_panels(record: Record) -> list[Panel]:
    """Loss, the score that a run of the task is told by, gradient norm, learning rate and speed by step."""
    train, valid, unit = record.train, record.valid, "token" if record.task is None else record.task.unit
    plain = any(math.isfinite(number(entry, "nll")) for entry in train)
    loss = line_plot(
        "loss",
        [series_of("training", train, "nll" if plain else "loss"), series_of("validation", valid, "loss")],
        x_label="step",
        y_label=f"loss, mean of {unit}s",
        description="Training and validation loss by step",
    )
    rate = _curve("rate", train, "lr", "learning rate", "Learning rate by step")
    gradient = _curve("gradient-norm", train, "grad_norm", "gradient norm", "Norm of the whole gradient by step", log=True)
    speed = _curve("speed", train, "tokens_per_second", f"{unit}s a second", f"{unit.capitalize()}s a second by step")
    return [
        Panel(loss, "Loss", "Both without label smoothing." if plain else ""),
        *_headline_panel(record),
        Panel(gradient, "Gradient norm", _clipping(train)),
        Panel(rate, "Learning rate"),
        Panel(speed, "Speed"),
    ]


def _headline_panel(record: Record) -> list[Panel]:
    """The score that a run of the task is told by, where validations measured it."""
    if record.task is None or record.task.headline is None:
        return []
    title = record.headline_title
    svg = _curve("quality", record.valid, record.task.headline.key, title, f"Validation {title} by step")
    return [Panel(svg, f"{title[:1].upper()}{title[1:]} on the validation set")]


def series_of(name: str, entries: Sequence[Entry], key: str) -> Series:
    """The numbers of `key` by step."""
    return Series(name, [number(entry, "step") for entry in entries], [number(entry, key) for entry in entries])


def _curve(name: str, entries: Sequence[Entry], key: str, label: str, description: str, *, log: bool = False) -> Markup | None:
    series = [series_of(label, entries, key)]
    return line_plot(name, series, x_label="step", y_label=label, description=description, log=log, from_zero=True)


def _clipping(train: Sequence[Entry]) -> str:
    """How often the gradient was clipped; every entry counts the steps since the one before."""
    clipped = sum(count for entry in train if math.isfinite(count := number(entry, "clipped")))
    return f"Clipped in {int(clipped):,} of {counted(int(train[-1]['step']), 'step')}." if clipped else ""
