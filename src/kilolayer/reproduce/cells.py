"""Aggregates the runs of a comparison: one cell per pair of two options, at the best values of the others, over all seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from kilolayer.compare.choice import by_setting, rank
from kilolayer.compare.grid import shown_value
from kilolayer.compare.outcome import Kind
from kilolayer.report.table import Table
from kilolayer.reproduce.stored_run import Run, died, ended

MARGIN = 0.02
"""Minimum difference in nats, in addition to two standard errors, for one mean loss to count as lower than another."""


@dataclass(frozen=True)
class Cell:
    """The seeds of the best setting among all candidates. While a candidate is unfinished, neither `lives` nor `died` is true.

    candidates: the runs of every setting that it was chosen from, including its own. loss: the mean of its seeds' best
    validation losses; NaN if a seed did not survive. error: the standard error of the mean; NaN for one seed. text: the
    outcome in words, if there is no loss.
    """

    options: dict[str, Any]
    runs: Sequence[Run]
    candidates: Sequence[Run]
    loss: float
    error: float
    text: str = ""

    @property
    def ended(self) -> bool:
        """Whether the outcome of every candidate is known; not so for runs that ran out of time or whose process failed."""
        return all(map(ended, self.candidates))

    @property
    def lives(self) -> bool:
        """Whether it is known that every seed of the best setting finished."""
        return self.ended and math.isfinite(self.loss)

    @property
    def died(self) -> bool:
        """Whether it is known that a seed of the best setting diverged or died."""
        return self.ended and any(map(died, self.runs))

    @property
    def shown(self) -> str:
        """The text of the cell in a table."""
        if math.isnan(self.loss):
            return self.text
        loss = f"{self.loss:.3f}" if math.isnan(self.error) else f"{self.loss:.3f} ± {self.error:.3f}"
        notes = [] if self.bleu is None else [f"BLEU {self.bleu:.1f}"]
        if count := sum(not ended(run) for run in self.candidates):
            notes.append(f"{count} of {len(self.candidates)} runs without a result")
        return f"{loss} ({', '.join(notes)})" if notes else loss

    @property
    def bleu(self) -> float | None:
        """BLEU on the test set, averaged over the seeds."""
        scores = [run["bleu"] for run in self.runs]
        return None if None in scores else fmean(scores)


def cell_of(runs: Iterable[Run]) -> Cell | None:
    """The best setting among `runs`, which differ in seed and in tuned options, chosen as in the table of a comparison.

    None if there are no runs.
    """
    candidates = list(runs)
    settings = by_setting(candidates, lambda run: run["options"])
    best = min(settings, key=lambda setting: rank(*ends(setting[1])), default=None)
    return None if best is None else _judged(*best, candidates)


def ends(runs: Sequence[Run]) -> tuple[list[Kind], list[float]]:
    """The outcome of each run, and the value by which it is chosen."""
    return [run["outcome"] for run in runs], [math.nan if run["cost"] is None else float(run["cost"]) for run in runs]


def _judged(options: dict[str, Any], runs: list[Run], candidates: list[Run]) -> Cell:
    dead = [run for run in runs if run["outcome"] != "finished" or run["loss"] is None]
    if dead:
        count = f" ({len(dead)} of {len(runs)} seeds)" if len(dead) < len(runs) else ""
        return Cell(options, runs, candidates, math.nan, math.nan, f"{dead[0]['text']}{count}")
    losses = [float(run["loss"]) for run in runs]
    error = stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else math.nan
    return Cell(options, runs, candidates, fmean(losses), error)


def grid_of(runs: Sequence[Run], row: str, column: str) -> dict[Any, dict[Any, Cell]]:
    """The best cell for each value of `row` and each of `column`, in the order of the runs."""
    return {value: cells_by([run for run in runs if _key(run, row) == value], column) for value in _values(runs, row)}


def cells_by(runs: Sequence[Run], option: str) -> dict[Any, Cell]:
    """The best cell for each value of `option`, in the order of the runs."""
    found = {value: cell_of(run for run in runs if _key(run, option) == value) for value in _values(runs, option)}
    return {value: cell for value, cell in found.items() if cell is not None}


def named_cells(runs: Mapping[str, Sequence[Run]]) -> dict[str, Cell]:
    """The best cell of each list of runs, which must not be empty."""
    return {name: cell for name, each in runs.items() if (cell := cell_of(each)) is not None}


def _values(runs: Sequence[Run], option: str) -> list[Any]:
    return list(dict.fromkeys(_key(run, option) for run in runs))


def _key(run: Run, option: str) -> Any:
    """The value of an option; that of a recipe with options as text, `admin start=released`."""
    value = run["options"][option]
    return shown_value(option, value) if isinstance(value, Mapping) else value


def is_lower(one: Cell, other: Cell) -> bool | None:
    """Whether the loss of `one` is clearly lower; None if either has one seed, did not survive, or may still change."""
    if not (one.lives and other.lives) or math.isnan(one.error) or math.isnan(other.error):
        return None
    return other.loss - one.loss > max(MARGIN, 2 * math.hypot(one.error, other.error))


def grid_numbers(grid: dict[Any, dict[Any, Cell]], corner: str) -> Table:
    """The grid as a table of losses, or outcomes in words."""
    columns = list(dict.fromkeys(column for cells in grid.values() for column in cells))
    rows = [[str(row), *(cells[column].shown if column in cells else "-" for column in columns)] for row, cells in grid.items()]
    return Table([corner, *map(str, columns)], rows)
