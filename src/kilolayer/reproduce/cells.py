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
    """Seeds of one setting. loss: the mean of their best validations; NaN where a seed did not live to the end.

    error: the standard error of the mean; NaN of one seed. text: what became of it, where it did not live.
    """

    options: dict[str, Any]
    runs: Sequence[Run]
    loss: float
    error: float
    text: str = ""

    @property
    def lives(self) -> bool:
        """Whether every seed came to the end."""
        return math.isfinite(self.loss)

    @property
    def ended(self) -> bool:
        """Whether what became of every seed is known; a run that had no time says nothing."""
        return all(map(ended, self.runs))

    @property
    def shown(self) -> str:
        """For a table."""
        if not self.lives:
            return self.text
        loss = f"{self.loss:.3f}" if math.isnan(self.error) else f"{self.loss:.3f} ± {self.error:.3f}"
        return loss if self.bleu is None else f"{loss} (BLEU {self.bleu:.1f})"

    @property
    def bleu(self) -> float | None:
        """The mean of the seeds on the test part."""
        scores = [run["bleu"] for run in self.runs]
        return None if None in scores else fmean(scores)


def cell_of(runs: Iterable[Run]) -> Cell | None:
    """The best setting among `runs`, which differ by seed and by what may be chosen, as the table of a comparison chooses it.

    None without runs.
    """
    settings = by_setting(runs, lambda run: run["options"])
    best = min(settings, key=lambda setting: rank(*_ends(setting[1])), default=None)
    return None if best is None else _judged(*best)


def _ends(runs: Sequence[Run]) -> tuple[list[Kind], list[float]]:
    """What became of each run, and what it is chosen by."""
    return [run["outcome"] for run in runs], [math.nan if run["cost"] is None else float(run["cost"]) for run in runs]


def _judged(options: dict[str, Any], runs: list[Run]) -> Cell:
    dead = [run for run in runs if run["outcome"] != "finished" or run["loss"] is None]
    if dead:
        count = f" ({len(dead)} of {len(runs)} seeds)" if len(dead) < len(runs) else ""
        return Cell(options, runs, math.nan, math.nan, f"{dead[0]['text']}{count}")
    losses = [float(run["loss"]) for run in runs]
    error = stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else math.nan
    return Cell(options, runs, fmean(losses), error)


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
    """Whether the loss of `one` is clearly lower; None where seeds or life are missing."""
    if not (one.lives and other.lives) or math.isnan(one.error) or math.isnan(other.error):
        return None
    return other.loss - one.loss > max(MARGIN, 2 * math.hypot(one.error, other.error))


def grid_numbers(grid: dict[Any, dict[Any, Cell]], corner: str) -> Table:
    """The grid as a table of losses and of words."""
    columns = list(dict.fromkeys(column for cells in grid.values() for column in cells))
    rows = [[str(row), *(cells[column].shown if column in cells else "-" for column in columns)] for row, cells in grid.items()]
    return Table([corner, *map(str, columns)], rows)
