"""The numbers that the runs of a comparison are told by, and the one that the best is chosen by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from kilolayer.compare.result import Result
from kilolayer.report.record import number
from kilolayer.tasks.registry import Headline

LOSS_DIGITS = 3


@dataclass(frozen=True)
class Measure:
    """A number that every run is told by. part: where it comes from."""

    key: str
    title: str
    digits: int
    larger_is_better: bool
    part: Literal["test", "validation", "training"]

    def of(self, result: Result) -> float:
        """Of a run: the mean over its test parts, its best validation, or its last loss of training; NaN where it has none."""
        if self.part == "test":
            parts = [table for name, table in result.scores.items() if name.startswith("test") or name == "validation"]
            values = [number(table, self.key, "value") for table in parts if isinstance(table, dict)]
        else:
            rows = result.valid if self.part == "validation" else result.train[-1:]
            values = [number(row, self.key) for row in rows]
        values = [value for value in values if not math.isnan(value)]
        if not values:
            return math.nan
        best: Callable[[list[float]], float] = max if self.larger_is_better else min
        return fmean(values) if self.part == "test" else best(values)

    def cost_of(self, result: Result) -> float:
        """The same with the sign by which a smaller one is better."""
        return -self.of(result) if self.larger_is_better else self.of(result)

    def show(self, value: float) -> str:
        """A value with its digits."""
        return f"{value:.{self.digits}f}"


VALIDATION_LOSS = Measure("loss", "validation loss", LOSS_DIGITS, False, "validation")
TRAINING_LOSS = Measure("nll", "training loss", LOSS_DIGITS, False, "training")


def measures_of(results: Sequence[Result], headline: Headline | None) -> tuple[Measure, tuple[Measure, ...]]:
    """What the best is chosen by, and what is told.

    It is chosen by the task's own measure on the validation part where runs have it, else by the validation loss; without a
    validation part by the training loss; never on the test part. headline: the task's own measure, which is left out where
    runs have several of its kind: an accuracy is neither better nor worse than a correlation.
    """
    own: list[Measure] = []
    titles = [] if headline is None else _titles(results, headline)
    if headline is not None and len(titles) < 2:
        for part in ("test", "validation"):
            title = f"{titles[0] if titles else headline.title}, {part}"
            own.append(Measure(headline.key, title, headline.digits, headline.larger_is_better, part))

    def known(measure: Measure) -> bool:
        return any(not math.isnan(measure.of(result)) for result in results)

    told = [measure for measure in [*own, VALIDATION_LOSS] if known(measure)]
    if not any(measure.part == "validation" for measure in told):
        told.append(TRAINING_LOSS)
    chosen_by = next(measure for measure in told if measure.part != "test")
    return chosen_by, tuple(told)


def _titles(results: Sequence[Result], headline: Headline) -> list[str]:
    """What the scores of the runs call the task's own measure, each name once."""
    entries = [table.get(headline.key) for each in results for table in each.scores.values() if isinstance(table, dict)]
    names = [entry.get("name") for entry in entries if isinstance(entry, dict)]
    return list(dict.fromkeys(name for name in names if isinstance(name, str) and name))
