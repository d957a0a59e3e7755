"""What the runs of a comparison say together: one cell for each pair of two options, at its best other options, over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from kilolayer.compare.choice import by_setting, rank
from kilolayer.compare.outcome import DIED, Kind
from kilolayer.report.table import Table
from kilolayer.reproduce.lab import Run

MARGIN = 0.02
"""Nats that two mean losses must be apart, besides two standard errors, before one is called lower."""


def died(run: Run) -> bool:
    """Whether a run came to a bad end; one that had no time, or whose process failed, says nothing of its setting."""
    return run["outcome"] in DIED


def ended(run: Run) -> bool:
    """Whether what became of a run is known."""
    return run["outcome"] == "finished" or died(run)


@dataclass(frozen=True)
class Cell:
    """Seeds of one setting, the best of all candidates. Of `lives` and `died` neither holds while a candidate has no end.

    candidates: the runs of every setting that it was chosen from, its own among them. loss: the mean of the best validations of
    its seeds; NaN where a seed did not live to the end. error: the standard error of the mean; NaN of one seed. text: what
    became of it, where there is no loss.
    """

    options: dict[str, Any]
    runs: Sequence[Run]
    candidates: Sequence[Run]
    loss: float
    error: float
    text: str = ""

    @property
    def ended(self) -> bool:
        """Whether what became of every candidate is known; a run that had no time, or whose process failed, says nothing."""
        return all(map(ended, self.candidates))

    @property
    def lives(self) -> bool:
        """Whether it is known that every seed of the best setting came to the end."""
        return self.ended and math.isfinite(self.loss)

    @property
    def died(self) -> bool:
        """Whether it is known that a seed of the best setting came to a bad end."""
        return self.ended and any(map(died, self.runs))

    @property
    def shown(self) -> str:
        """For a table."""
        if math.isnan(self.loss):
            return self.text
        loss = f"{self.loss:.3f}" if math.isnan(self.error) else f"{self.loss:.3f} ± {self.error:.3f}"
        notes = [] if self.bleu is None else [f"BLEU {self.bleu:.1f}"]
        if count := sum(not ended(run) for run in self.candidates):
            notes.append(f"{count} of {len(self.candidates)} runs without a result")
        return f"{loss} ({', '.join(notes)})" if notes else loss

    @property
    def bleu(self) -> float | None:
        """The mean of the seeds on the test part."""
        scores = [run["bleu"] for run in self.runs]
        return None if None in scores else fmean(scores)


def cell_of(runs: Iterable[Run]) -> Cell | None:
    """The best setting among `runs`, which differ by seed and by what may be chosen, as the table of a comparison chooses it.

    None without runs.
    """
    candidates = list(runs)
    settings = by_setting(candidates, lambda run: run["options"])
    best = min(settings, key=lambda setting: rank(*_ends(setting[1])), default=None)
    return None if best is None else _judged(*best, candidates)


def _ends(runs: Sequence[Run]) -> tuple[list[Kind], list[float]]:
    """What became of each run, and what it is chosen by."""
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
    return {value: cells_by([run for run in runs if run["options"][row] == value], column) for value in _values(runs, row)}


def cells_by(runs: Sequence[Run], option: str) -> dict[Any, Cell]:
    """The best cell for each value of `option`, in the order of the runs."""
    found = {value: cell_of(run for run in runs if run["options"][option] == value) for value in _values(runs, option)}
    return {value: cell for value, cell in found.items() if cell is not None}


def _values(runs: Sequence[Run], option: str) -> list[Any]:
    return list(dict.fromkeys(run["options"][option] for run in runs))


def is_lower(one: Cell, other: Cell) -> bool | None:
    """Whether the loss of `one` is clearly lower; None where either has one seed, did not live, or may still change."""
    if not (one.lives and other.lives) or math.isnan(one.error) or math.isnan(other.error):
        return None
    return other.loss - one.loss > max(MARGIN, 2 * math.hypot(one.error, other.error))


def grid_numbers(grid: dict[Any, dict[Any, Cell]], corner: str) -> Table:
    """The grid as a table of losses and of words."""
    columns = list(dict.fromkeys(column for cells in grid.values() for column in cells))
    rows = [[str(row), *(cells[column].shown if column in cells else "-" for column in columns)] for row, cells in grid.items()]
    return Table([corner, *map(str, columns)], rows)
