"""The measures reported for the runs of a comparison, and the one by which the best is chosen."""

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
    """A measure reported for every run. part: the data that it is computed on."""

    key: str
    title: str
    digits: int
    larger_is_better: bool
    part: Literal["test", "validation", "training"]

    @property
    def name(self) -> str:
        """The title without the part."""
        return self.title.removesuffix(f", {self.part}")

    def of(self, result: Result) -> float:
        """The value for a run: the mean over its test sets, its best validation or its last training loss; NaN if none."""
        if self.part == "test":
            parts = [table for name, table in result.scores.items() if name.startswith("test")]
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
        """The value with its sign chosen so that smaller is better."""
        return -self.of(result) if self.larger_is_better else self.of(result)

    def show(self, value: float) -> str:
        """Format a value with the measure's digits."""
        return f"{value:.{self.digits}f}"

    def is_zero(self, value: float) -> bool:
        """Whether a score is shown as 0, as the BLEU of short runs is: it then tells no run from another."""
        return self.larger_is_better and self.show(abs(value)) == self.show(0.0)


VALIDATION_LOSS = Measure("loss", "validation loss", LOSS_DIGITS, False, "validation")
TRAINING_LOSS = Measure("nll", "training loss", LOSS_DIGITS, False, "training")


def measures_of(results: Sequence[Result], headline: Headline | None) -> tuple[Measure, tuple[Measure, ...]]:
    """The measure that the best run is chosen by, and the measures that are reported.

    The best is chosen by the task's own measure on the validation set if all finished runs have it, else by the validation
    loss; without a validation set by the training loss; never on the test set. A score that is 0 for all runs chooses nothing
    and comes last.
    headline: the task's own measure, which is left out if runs have several kinds of it, since an accuracy cannot be compared
    with a correlation.
    """
    own: list[Measure] = []
    titles = [] if headline is None else _titles(results, headline)
    if headline is not None and len(titles) < 2:
        for part in ("test", "validation"):
            title = f"{titles[0] if titles else headline.title}, {part}"
            own.append(Measure(headline.key, title, headline.digits, headline.larger_is_better, part))

    def known(measure: Measure) -> bool:
        return any(not math.isnan(measure.of(result)) for result in results)

    def says_nothing(measure: Measure) -> bool:
        return all(math.isnan(value) or measure.is_zero(value) for value in map(measure.of, results))

    available = [measure for measure in [*own, VALIDATION_LOSS] if known(measure)]
    if not any(measure.part == "validation" for measure in available):
        available.append(TRAINING_LOSS)
    available.sort(key=says_nothing)
    finished = [result for result in results if result.outcome.kind == "finished"]
    choices = [measure for measure in available if measure.part != "test"]
    # A run without the measure that the others have would never be the best.
    shared = [measure for measure in choices if all(not math.isnan(measure.of(result)) for result in finished)]
    return (shared or choices)[0], tuple(available)


def _titles(results: Sequence[Result], headline: Headline) -> list[str]:
    """The names of the task's own measure in the scores of the runs, without duplicates."""
    entries = [table.get(headline.key) for each in results for table in each.scores.values() if isinstance(table, dict)]
    names = [entry.get("name") for entry in entries if isinstance(entry, dict)]
    return list(dict.fromkeys(name for name in names if isinstance(name, str) and name))
