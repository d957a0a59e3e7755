"""Reproductions that consist of one comparison: a grid of runs over two options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Reproduction
from kilolayer.reproduce.cells import Cell, cell_of, ends, grid_numbers, grid_of
from kilolayer.reproduce.stored_run import Run, ended, has

if TYPE_CHECKING:
    from kilolayer.config import Table as ConfigTable
    from kilolayer.report.panel import Panel
    from kilolayer.reproduce.lab import Lab

RATE, SEED = "train.lr", "train.seed"
WIDER = 2
"""The most by how many factors of 2 a grid of learning rates grows beyond each of its ends."""
FINALISTS = 2
"""How many learning rates are trained with every seed."""


def at_best_rate(
    lab: Lab,
    name: str,
    config: ConfigTable,
    settings: Sequence[Mapping[str, Any]],
    rates: Sequence[float],
    seeds: Sequence[int],
) -> Found:
    """Train every setting at every learning rate with the first seed, then at its two best rates with all seeds.

    settings: no two of them may hold for the same run. rates: they differ by factors of 2; where the best one is the lowest or
    the highest, the grid grows; the tiny form takes the first rate and the first seed. Returns runs: those at the rate with the
    best mean over all seeds; not_chosen: the others. A setting with a run that has not ended has no best rate yet; all of its
    runs are then in `runs`, and its cell has not ended.
    """
    if lab.tiny:
        rates, seeds = rates[:1], seeds[:1]
    searches = [RateSearch(each, tuple(rates), tuple(seeds), WIDER * (not lab.tiny)) for each in settings]
    while wanted := [setting for search in searches for setting in search.wanted()]:
        for run in lab.compare_settings(name, config, wanted):
            next(search for search in searches if search.holds(run)).runs.append(run)
    runs = [run for search in searches for run in search.chosen()]
    return {"runs": runs, "not_chosen": [run for search in searches for run in search.runs if run not in runs]}


@dataclass
class RateSearch:
    """The search for the best learning rate of one setting. grid: the rates to begin with. runs: those trained so far."""

    setting: Mapping[str, Any]
    grid: tuple[float, ...]
    seeds: tuple[int, ...]
    wider: int
    runs: list[Run] = field(default_factory=list)

    def holds(self, run: Run) -> bool:
        """Whether a run belongs to this search."""
        return has(run, self.setting)

    def wanted(self) -> list[dict[str, Any]]:
        """The settings to train next; none if the search is over, or if the outcome of a run is not known."""
        if not self.ended:
            return []
        rates = sorted({*self.grid, *(run["options"][RATE] for run in self.runs)})
        pairs = [(rate, self.seeds[0]) for rate in rates]
        if not (missing := self._missing(pairs)):
            missing = self._missing(self._beyond(rates)) or self._missing(
                (rate, seed) for rate in self._best(rates)[:FINALISTS] for seed in self.seeds
            )
        return [{**self.setting, RATE: rate, SEED: seed} for rate, seed in missing]

    @property
    def ended(self) -> bool:
        """Whether the outcome of every run so far is known."""
        return all(map(ended, self.runs))

    def chosen(self) -> list[Run]:
        """The runs at the best of the rates with all seeds; all runs, if the outcome of one is not known."""
        if not self.ended:
            return self.runs
        rates = self._best(sorted({run["options"][RATE] for run in self.runs}))[:FINALISTS]
        best = cell_of(run for run in self.runs if run["options"][RATE] in rates)
        return [] if best is None else list(best.runs)

    def _missing(self, pairs: Iterable[tuple[float, int]]) -> list[tuple[float, int]]:
        known = {(run["options"][RATE], run["options"][SEED]) for run in self.runs}
        return [pair for pair in pairs if pair not in known]

    def _beyond(self, rates: Sequence[float]) -> list[tuple[float, int]]:
        """The rate beyond the end of the grid at which the best one is, with the first seed; none if the best one is inside."""
        best = self._best(rates)[0]
        lowest, highest = self.grid[0] / 2**self.wider, self.grid[-1] * 2**self.wider
        beyond = [best / 2] * (best == rates[0]) + [best * 2] * (best == rates[-1])
        return [(rate, self.seeds[0]) for rate in beyond if lowest * 0.99 < rate < highest * 1.01]

    def _best(self, rates: Sequence[float]) -> list[float]:
        """The rates by the result of the first seed, the best one first."""
        from kilolayer.compare.choice import rank

        first = {run["options"][RATE]: run for run in self.runs if run["options"][SEED] == self.seeds[0]}
        return sorted(rates, key=lambda rate: rank(*ends([first[rate]])))


class Sweep(Reproduction):
    """row, column: the options of the grid of found["runs"]; column_title: the second one in words, for table and plot."""

    row: ClassVar[str] = "model.recipe"
    column: ClassVar[str] = "layers"
    column_title: ClassVar[str] = "layers per side"

    def grid(self, found: Found) -> dict[str, dict[Any, Cell]]:
        """The best cell of each row and column."""
        return grid_of(found["runs"], self.row, self.column)

    def numbers(self, found: Found) -> Table:
        return grid_numbers(self.grid(found), f"validation loss by {self.column_title}")

    def panels(self, found: Found) -> list[Panel]:
        from kilolayer.reproduce.pictures import by_column

        return [by_column(found["runs"], self.row, self.column, self.column_title, f"Validation loss by {self.column_title}")]
