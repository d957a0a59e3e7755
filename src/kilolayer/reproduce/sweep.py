"""Reproductions that consist of one comparison: a grid of runs over two options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Reproduction

if TYPE_CHECKING:
    from kilolayer.config import Table as ConfigTable
    from kilolayer.report.panel import Panel
    from kilolayer.reproduce.cells import Cell
    from kilolayer.reproduce.lab import Lab, Run


def at_best_rate(
    lab: Lab, name: str, config: ConfigTable, axes: Mapping[str, Sequence[Any]], rates: Sequence[float], seeds: Sequence[int]
) -> Found:
    """Train every combination of `axes` at every learning rate with the first seed, then at its best rate with all seeds.

    Returns runs: those at the best rates, for all seeds; not_chosen: the others, all of which have ended. A combination whose
    rates are not all finished has no best rate yet; all of its runs are then in `runs`, and its cell has not ended.
    """
    from kilolayer.compare.grid import Axis, same, settings_of
    from kilolayer.config import merge
    from kilolayer.reproduce.cells import cell_of, ended

    config = merge(config, {"train": {"stop_when_dead": True}})  # its outcome is known, and its slot is free
    cells = settings_of([Axis(option, tuple(values)) for option, values in axes.items()])
    first, *others = seeds
    tried = lab.compare_settings(
        name, config, [{**cell, "train.lr": rate, "train.seed": first} for cell in cells for rate in rates]
    )
    runs: list[Run] = []
    not_chosen: list[Run] = []
    further: list[Mapping[str, Any]] = []
    for cell in cells:
        own = [run for run in tried if same({option: run["options"][option] for option in cell}, cell)]
        best = cell_of(own)
        if best is None or not all(map(ended, own)):
            runs += own
            continue
        runs += best.runs
        not_chosen += [run for run in own if run not in best.runs]
        further += [{**best.options, "train.seed": seed} for seed in others]
    return {"runs": runs + (lab.compare_settings(name, config, further) if further else []), "not_chosen": not_chosen}


class Sweep(Reproduction):
    """row, column: the options of the grid of found["runs"]; column_title: the second one in words, for table and plot."""

    row: ClassVar[str] = "model.recipe"
    column: ClassVar[str] = "layers"
    column_title: ClassVar[str] = "layers per side"

    def grid(self, found: Found) -> dict[str, dict[Any, Cell]]:
        """The best cell of each row and column."""
        from kilolayer.reproduce.cells import grid_of

        return grid_of(found["runs"], self.row, self.column)

    def numbers(self, found: Found) -> Table:
        from kilolayer.reproduce.cells import grid_numbers

        return grid_numbers(self.grid(found), f"validation loss by {self.column_title}")

    def panels(self, found: Found) -> list[Panel]:
        from kilolayer.reproduce.pictures import by_column

        return [by_column(found["runs"], self.row, self.column, self.column_title, f"Validation loss by {self.column_title}")]
