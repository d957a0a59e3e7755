"""Which runs of a row survived, by a rule that was fixed before they were trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Fate = Literal["survived", "not finite", "stack dead", "no progress", "behind", "slow"]
MARGIN = 0.2  # nats per token
REACHED = 1e-3  # of the largest layer's gradient, by which these runs were labelled


@dataclass(frozen=True)
class Ended:
    """How a run ended: the mean loss of its last tenth, and the smallest fraction of the gradient that a stack then has."""

    lr: float
    warmup: float
    loss: float
    alive: float


def fates(row: Sequence[Ended], frequency_loss: float) -> list[Fate]:
    """The fate of each run of a row.

    A run survives if its loss is finite, below that of word frequencies, within 0.2 of the best of its row, and no stack is
    dead. One that is further behind at a lower learning rate than the best is slow: this says nothing about the largest rate.
    """
    sound = [run for run in row if _fault(run, frequency_loss) is None]
    best = min(sound, key=lambda run: run.loss, default=None)
    found: list[Fate] = []
    for run in row:
        fault = _fault(run, frequency_loss)
        if fault == "no progress" and best is not None and run.lr < best.lr and run.warmup >= best.warmup:
            fault = "slow"
        elif fault is None and best is not None and run.loss > best.loss + MARGIN:
            fault = "slow" if run.lr < best.lr or (run.lr == best.lr and run.warmup > best.warmup) else "behind"
        found.append(fault or "survived")
    return found


def _fault(run: Ended, frequency_loss: float) -> Fate | None:
    if not math.isfinite(run.loss):
        return "not finite"
    if run.alive < REACHED:
        return "stack dead"
    return None if run.loss < frequency_loss else "no progress"
