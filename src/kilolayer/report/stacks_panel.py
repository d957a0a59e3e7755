"""The plot of how much gradient reaches the first layers of each stack during a run, and what it shows in words."""

from __future__ import annotations

from collections.abc import Sequence

from kilolayer.evaluate.stack_label import LEVELS, StackCheck, as_fraction, checks_of, dead_stacks
from kilolayer.report.figure import Series
from kilolayer.report.panel import Ends, Panel, chart_panel
from kilolayer.report.panels import coloured
from kilolayer.report.record import Record, number

TITLE = "Gradient that reaches the first layers"
MEANING = "The running gradient of a stack's first tenth of layers, as a share of the largest layer's."


def stacks_panel(records: Sequence[Record], ends: Ends | None = None) -> Panel:
    """The share of the largest layer's gradient by step: of each stack of a run, or of the weakest stack of each of several."""
    series: list[Series] = []
    for record, colour in coloured(records):
        checks = checks_of(record.stacks)
        if len(records) == 1:
            series += [_series(side, own) for side, own in checks.items()]
        elif checks:
            weakest = min(checks.values(), key=lambda own: min(check.reached for check in own))
            series.append(_series(record.name, weakest, colour))
    return chart_panel(
        "stacks",
        TITLE,
        series,
        x_label="step",
        y_label="share of the largest layer's",
        description=f"{TITLE} of a stack by step",
        note=MEANING if len(records) == 1 else "Of each run, the stack with the lowest value.",
        log=True,
        ends=ends,
    )


def troughs(record: Record) -> list[str]:
    """A sentence for each stack whose first layers had lost most of their gradient and got it back."""
    checks = checks_of(record.stacks)
    dead = {each.side for each in dead_stacks(checks, number(record.config, "train", "lr"))}
    found: list[str] = []
    for side, own in checks.items():
        lowest = min(own, key=lambda check: check.reached)
        back = next((check for check in own if check.step > lowest.step and check.reached >= 10 * LEVELS[0].share), None)
        if side not in dead and lowest.reached < LEVELS[1].share and back is not None:
            found.append(
                f"The {side} passed through a trough: at step {lowest.step:,} its first layers got "
                f"{as_fraction(lowest.reached)} of the largest layer's gradient, and at step {back.step:,} again "
                f"{as_fraction(back.reached)}."
            )
    return found


def _series(name: str, checks: Sequence[StackCheck], colour: str | None = None) -> Series:
    return Series(name, [check.step for check in checks], [check.reached for check in checks], colour)
