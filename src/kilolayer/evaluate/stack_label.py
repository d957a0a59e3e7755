"""Whether the first layers of a stack learn: the label that a run gets at its end, and what is known of it before.

The label is given from the rows "stacks" of a run's metrics. A gradient that fades on the way is a forecast of it, no more:
models that learn to translate pass through a trough while their decoder learns the frequencies of words. How often such runs
recover was counted on runs that went to their end (benchmarks/dead).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

SHARE = 0.1
"""The fraction of a stack's layers that count as its first layers, and of a run's steps that count as its end."""
DEAD = 1e-4
"""A stack is dead if, at the end of its run, its first layers get less than this of the largest layer's gradient."""
MOVED, LEAST_MOVE = 1e-3, 1e-6
"""As a fraction of Adam's usual step, and times the peak learning rate: below both, eps dominates and no weight moves."""
DYING, FEWEST = ((0.03, 5e-5), (0.1, 1e-4)), 3
"""A stack is dying once every check over the first of these fractions of the run's steps was below the first share, or over the
second below the second; at least FEWEST checks. Fitted on one set of runs and tested on another (benchmarks/dead)."""


@dataclass(frozen=True)
class Level:
    """A share of the gradient below which a stack fades.

    seen: the runs of benchmarks/dead that had a stack below it before the last tenth of their steps. recovered: how many of
    these had no stack that was dead at the end. learned: how many made progress and, if they translate, read their source.
    """

    share: float
    seen: int
    recovered: int
    learned: int

    @property
    def text(self) -> str:
        """What happened to such runs, in a sentence."""
        seen = f"Of {self.seen} runs that were seen below {as_fraction(self.share)}"
        return f"{seen}, {self.recovered} recovered, and {self.learned} learned."


LEVELS = (Level(1e-2, 228, 131, 75), Level(1e-3, 161, 64, 41), Level(1e-4, 115, 18, 16))


def first_layers(norms: Sequence[float], share: float = SHARE) -> float:
    """The mean over the first `share` of a stack's layers, at least one layer."""
    count = max(1, round(share * len(norms)))
    return sum(norms[:count]) / count


@dataclass(frozen=True)
class StackCheck:
    """A check of one stack after a step.

    reached: the running gradient of its first layers as a fraction of the largest layer's in the model. moved: the largest
    step of any weight in them, where 1 is Adam's usual step; NaN if the learning rate is 0.
    """

    step: int
    reached: float
    moved: float

    def is_hidden(self, lr: float) -> bool:
        """Whether eps keeps the first layers still; lr: the run's peak learning rate."""
        return self.moved < MOVED and self.moved * lr < LEAST_MOVE

    def row(self) -> dict[str, float]:
        """The values for metrics.jsonl, in four digits."""
        return {"reached": float(f"{self.reached:.4g}"), "moved": float(f"{self.moved:.4g}")}


@dataclass
class Fading:
    """How far a stack has faded.

    level: the number of LEVELS that it has been below. since, checks: for each share of DYING, the step of the first check in
    the unbroken row of checks below it that ends at the last one, and their number; None and 0 if the last one was not below.
    hidden: whether eps has ever hidden its gradient.
    """

    level: int = 0
    since: list[int | None] = field(default_factory=lambda: [None] * len(DYING))
    checks: list[int] = field(default_factory=lambda: [0] * len(DYING))
    hidden: bool = False

    def add(self, check: StackCheck) -> Level | None:
        """Take in the next check; returns the lowest level that the stack is now below, if it was not below it before."""
        for index, (_, share) in enumerate(DYING):
            before, low = self.since[index], check.reached < share
            self.since[index] = (check.step if before is None else before) if low else None
            self.checks[index] = self.checks[index] + 1 if low else 0
        level = level_of(check.reached)
        before, self.level = self.level, max(self.level, 0 if level is None else LEVELS.index(level) + 1)
        return level if self.level > before else None

    def is_dying(self, step: int, steps: int) -> bool:
        """Whether the stack will be dead at the end of a run of this many steps, as far as any run has shown."""
        return any(
            since is not None and checks >= FEWEST and step - since >= window * steps
            for (window, _), since, checks in zip(DYING, self.since, self.checks, strict=True)
        )


def level_of(reached: float) -> Level | None:
    """The lowest level that a share of the gradient is below."""
    return next((level for level in reversed(LEVELS) if reached < level.share), None)


def as_fraction(share: float) -> str:
    """Show a small share as a fraction, 0.0033 as 1/300, and others as a decimal."""
    if not share:
        return "none"
    return f"1/{float(f'{1 / share:.2g}'):,.0f}" if share < 0.1 else f"{share:.2g}"


@dataclass(frozen=True)
class DeadStack:
    """A stack that is dead at the end of its run. reached, moved: medians over the last tenth of the steps."""

    side: str
    reached: float
    moved: float

    @property
    def hidden(self) -> bool:
        """Whether eps keeps the first layers still, although a gradient reaches them."""
        return self.reached >= DEAD

    @property
    def text(self) -> str:
        """In words, for a message."""
        if self.hidden:
            return (
                f"the {self.side} is dead: over the last tenth of the steps, a step moved its first layers by {self.moved:.1e} "
                "of the learning rate: train.eps hides their gradient"
            )
        return (
            f"the {self.side} is dead: over the last tenth of the steps, the gradient of its first layers was "
            f"{as_fraction(self.reached)} of the largest layer's"
        )


def checks_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[StackCheck]]:
    """The checks of each stack, from the rows "stacks" of a run's metrics, in the order of their steps."""
    by_side: dict[str, list[StackCheck]] = {}
    for row in rows:
        for side, values in row.items():
            if isinstance(values, Mapping) and not math.isnan(reached := _number(values.get("reached"))):
                check = StackCheck(int(row["step"]), reached, _number(values.get("moved")))
                by_side.setdefault(side, []).append(check)
    return by_side


def _number(value: Any) -> float:
    """A number of a row, which may come from someone else; NaN for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63
    return float(value) if is_number else math.nan


def dead_stacks(checks: Mapping[str, Sequence[StackCheck]], lr: float) -> list[DeadStack]:
    """The stacks that are dead at the end of a run. lr: the run's peak learning rate.

    The end is the last tenth of the steps up to the last check; if there is no check in it, the last one counts.
    """
    found = []
    for side, own in checks.items():
        last = [check for check in own if check.step > (1 - SHARE) * own[-1].step] or list(own[-1:])
        if not last:
            continue
        reached = median(check.reached for check in last)
        moved = median([check.moved for check in last if not math.isnan(check.moved)] or [math.inf])
        if reached < DEAD or StackCheck(last[-1].step, reached, moved).is_hidden(lr):
            found.append(DeadStack(side, reached, moved))
    return found
