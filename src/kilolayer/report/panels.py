"""Plots of training, for one run or for several in the same plot."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kilolayer.report.axis_colours import COLOURS
from kilolayer.report.figure import PALETTE, Series
from kilolayer.report.panel import Ends, Panel, chart_panel, series_of
from kilolayer.report.record import Entry, Record, number
from kilolayer.terminal import counted, plural

DASHED = (6, 3)


def steps_shown(records: Sequence[Record]) -> Ends | None:
    """The range of all plots by step: from 0 to the last step that any run has recorded; None before the first step."""
    kinds = [kind for record in records for kind in (record.train, record.valid, record.layers, record.routing)]
    steps = [number(entry, "step") for kind in kinds for entry in kind[-1:]]
    return (0.0, max(steps)) if steps else None


def training_panels(records: Sequence[Record], ends: Ends | None = None) -> list[Panel]:
    """Loss, the task's headline score, gradient norm, learning rate and speed by step."""
    units = dict.fromkeys("token" if record.task is None else record.task.unit for record in records)
    unit = " or ".join(units)
    plain = all(any(math.isfinite(number(entry, "nll")) for entry in record.train) for record in records)
    losses: list[Series] = []
    for record, colour in coloured(records):
        name = f"{record.name}, " if len(records) > 1 else ""
        losses.append(series_of(f"{name}training", record.train, "nll" if plain else "loss", colour))
        losses.append(
            series_of(f"{name}validation", record.valid, "loss", colour, DASHED)
            if len(records) > 1
            else series_of("validation", record.valid, "loss")
        )
    return [
        chart_panel(
            "loss",
            "Loss",
            losses,
            x_label="step",
            y_label=f"loss, mean over {plural(unit)}",
            description="Training and validation loss by step",
            note="Both without label smoothing." if plain and records else "",
            log=True,
            ends=ends,
        ),
        *_headline_panels(records, ends),
        _curve("gradient-norm", "Gradient norm", records, "grad_norm", "norm of the whole gradient", ends, log=True),
        _curve("rate", "Learning rate", records, "lr", "learning rate", ends),
        _curve("speed", "Speed", records, "tokens_per_second", f"{plural(unit)} per second", ends),
    ]


def coloured(records: Sequence[Record]) -> list[tuple[Record, str | None]]:
    """Each run with the colour that it has in all plots; None if there is only one run."""
    if len(records) == 1:
        return [(records[0], None)]
    return [(record, COLOURS[index % len(COLOURS)]) for index, record in enumerate(records)]


def _on_the_validation_set(title: str) -> str:
    name, comma, unit = title.partition(", ")
    return f"{name[:1].upper()}{name[1:]} on the validation set{comma}{unit}"


def _headline_panels(records: Sequence[Record], ends: Ends | None) -> list[Panel]:
    """One panel for each headline score of the runs' tasks that validations measured."""
    found: dict[str, list[Series]] = {}
    for record, colour in coloured(records):
        if record.task is not None and record.task.headline is not None:
            series = series_of(record.name, record.valid, record.task.headline.key, colour or PALETTE[0])
            found.setdefault(record.headline_title, []).append(series)
    return [
        chart_panel(
            f"quality-{index}",
            _on_the_validation_set(title),
            series,
            x_label="step",
            y_label=title,
            description=f"Validation {title} by step",
            from_zero=True,
            ends=ends,
        )
        for index, (title, series) in enumerate(found.items())
    ]


def _curve(
    name: str, title: str, records: Sequence[Record], key: str, label: str, ends: Ends | None, *, log: bool = False
) -> Panel:
    series = [series_of(record.name, record.train, key, colour or PALETTE[0]) for record, colour in coloured(records)]
    return chart_panel(
        name,
        title,
        series,
        x_label="step",
        y_label=label,
        description=f"{label[:1].upper()}{label[1:]} by step",
        note=_clipping(records[0].train) if key == "grad_norm" and len(records) == 1 else "",
        log=log,
        from_zero=True,
        ends=ends,
    )


def _clipping(train: Sequence[Entry]) -> str:
    """A note on how often the gradient was clipped. Each entry counts the steps since the previous entry."""
    clipped = sum(count for entry in train if math.isfinite(count := number(entry, "clipped")))
    return f"Clipped in {int(clipped):,} of {counted(int(train[-1]['step']), 'step')}." if clipped else ""
