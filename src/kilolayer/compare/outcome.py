"""The outcome of a run, from its metrics. A run that dies is a result too, with how and when it died."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Literal

from kilolayer.evaluate.stack_label import checks_of, dead_stacks
from kilolayer.report.record import Record, number
from kilolayer.training.guard import TOLERATED

Kind = Literal["finished", "diverged", "dead", "source_not_read", "no_progress", "unfinished", "failed", "waiting"]
"""source_not_read: a translator that finished without reading its source, in the verdicts of reproductions. Comparisons, whose
runs may be too short for it, note it beside the loss of a finished run."""
DIED: tuple[Kind, ...] = ("diverged", "dead", "source_not_read", "no_progress")
RISE = 0.5
"""Nats above its lowest value at which a loss has diverged: more than batches differ, less than any learning gains."""
ABOVE_START = 0.1
"""The same for a loss that is also above its starting value: a loss that never fell exceeds it by chance."""
KNOWN = 0.05
"""Nats below the loss of label frequencies that a run must reach; one that knows only these ends within a few hundredths."""
FEW = 4
"""With fewer rows of training metrics, which do not make a curve, the validations are used instead."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run. step: where it happened, or how far the run has come; text: a short description."""

    kind: Kind
    step: int | None
    text: str

    @property
    def died(self) -> bool:
        """Whether the run has ended badly."""
        return self.kind in DIED


def outcome_of(record: Record | None, failure: str | None = None) -> Outcome:
    """The outcome of a run from its record; None: it has no folder. failure: why its process failed, if it did."""
    if record is None:
        return Outcome("waiting", None, "waiting") if failure is None else Outcome("failed", None, f"failed: {failure}")
    step = max((int(row["step"]) for row in (*record.train, *record.valid)), default=0)
    found = ended_by_forecast(record) or ended_by_divergence(record)
    if found is not None:
        return found
    if not record.scores:
        if (lasting := _long_diverged(record)) is not None:
            return lasting
        if failure is not None:
            return Outcome("failed", step, f"failed: {failure}")
        wanted = number(record.config, "train", "steps")
        return Outcome("unfinished", step, f"step {step:,}" + (f" of {wanted:,.0f}" if wanted == wanted else ""))
    fault = _not_finite(record) or _loss_rose(record) or _dead_at_end(record, step) or _no_progress(record, step)
    return fault or Outcome("finished", step, "finished")


def ended_by_divergence(record: Record) -> Outcome | None:
    """A divergence that ended the run: too many steps in a row were skipped, up to the last one."""
    skipped = [int(row["step"]) for row in record.event if str(row.get("text", "")).endswith("is not finite")]
    last = skipped[-TOLERATED:]
    in_a_row = len(last) == TOLERATED and last[-1] - last[0] == TOLERATED - 1
    if not in_a_row or any(row["step"] > last[-1] for row in record.train):
        return None
    return _diverged(last[0])


def ended_by_forecast(record: Record) -> Outcome | None:
    """The forecast of a dead stack that ended the run, with train.stop_when_dead."""
    for row in record.event:
        if isinstance(side := row.get("ended_by"), str) and not any(other["step"] > row["step"] for other in record.train):
            return Outcome("dead", int(row["step"]), f"{side} dying, ended at step {int(row['step']):,}")
    return None


def _long_diverged(record: Record) -> Outcome | None:
    """A divergence of an unfinished run that has lasted as long as all training before it, which no spike does."""
    found = _not_finite(record) or _loss_rose(record)
    if found is None or found.step is None:
        return None
    steps = [int(row["step"]) for row in (record.train if len(record.train) >= FEW else record.valid)]
    since = sum(step >= found.step for step in steps)
    return found if since >= max(FEW, len(steps) - since) else None


def _diverged(step: int) -> Outcome:
    return Outcome("diverged", step, f"diverged at step {step:,}")


def _dead_at_end(record: Record, step: int) -> Outcome | None:
    """Stacks that are dead at the end of a finished run, whatever was seen on the way."""
    dead = [each.side for each in dead_stacks(checks_of(record.stacks), number(record.config, "train", "lr"))]
    return Outcome("dead", step, f"{' and '.join(dead)} dead") if dead else None


def _not_finite(record: Record) -> Outcome | None:
    """A loss that is not finite up to the end; the step is that of the first such row."""
    for rows, key in ((record.train, _training_key(record)), (record.valid, "loss")):
        first = len(rows)
        while first and math.isnan(number(rows[first - 1], key)):
            first -= 1
        if first < len(rows):
            return _diverged(int(rows[first]["step"]))
    return None


def _loss_rose(record: Record) -> Outcome | None:
    """A loss that rose for good. Uses the training loss, since the validation loss also rises when a model overfits."""
    rows, key = (record.train, _training_key(record)) if len(record.train) >= FEW else (record.valid, "loss")
    losses = [number(row, key) for row in rows]
    finite = [loss for loss in losses if not math.isnan(loss)]
    if len(finite) < 2:
        return None
    smooth = [median(finite[max(0, index - 2) : index + 3]) for index in range(len(finite))]
    lowest = min(smooth)
    # The smallest median is above the start if the loss rose in the first steps.
    limit = min(lowest + RISE, finite[0] + RISE, max(finite[0], lowest + ABOVE_START))
    first = len(losses)
    while first and not losses[first - 1] <= limit:
        first -= 1
    if first in (0, len(losses)) or not median(finite[-3:]) > limit:
        return None
    return _diverged(int(rows[first]["step"]))


def _no_progress(record: Record, step: int) -> Outcome | None:
    """A loss that ends no lower than that of label frequencies, if it is known, both in training and on the validation set."""
    reference = max((number(row, "frequency_loss") for row in record.reference), default=math.nan)
    trained = [number(row, _training_key(record)) for row in record.train[-3:]]
    ends = [*([median(trained)] if trained else []), *(number(row, "loss") for row in record.valid[-1:])]
    if ends and min(ends) > reference - KNOWN:
        return Outcome("no_progress", step, "no progress")
    return None


def _training_key(record: Record) -> str:
    """The key of the loss without label smoothing, if it was recorded."""
    return "nll" if any("nll" in row for row in record.train) else "loss"
