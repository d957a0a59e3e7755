"""DeepNet, Figure 6: convergence with varying depth."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from kilolayer.reproduce.base import Found, Verdict, held, not_held, register, undecided
from kilolayer.reproduce.cells import Cell, is_lower
from kilolayer.reproduce.deepnet_table1 import recipes_by_depth
from kilolayer.reproduce.sweep import Sweep

if TYPE_CHECKING:
    from kilolayer.reproduce.lab import Lab


@register
class Figure6(Sweep):
    """How fast each method learns at each depth."""

    name = "deepnet-figure6"
    claim = "DeepNorm is stable from shallow to deep, and keeps improving as the model goes deeper; most baselines do not."
    setting = "The runs of deepnet-table1: 6, 18, 50 and 100 layers per side, 1,000 steps (the paper: 10 to 100, 8,000 steps)."
    rule = (
        "Held if DeepNorm lives at every depth, its validation loss is not clearly higher (two standard errors and 0.02 nats) "
        "at any depth than at the one before, and at most half of the other methods do as well. Not held if DeepNorm dies at "
        "a depth, or is clearly higher at the greatest depth than at the smallest. Otherwise it is undecided."
    )

    def measure(self, lab: Lab) -> Found:
        return recipes_by_depth(lab)

    def judge(self, found: Found) -> Verdict:
        grid = self.grid(found)

        def improves(cells: dict[int, Cell]) -> bool:
            row = list(cells.values())
            return all(cell.lives for cell in row) and not any(is_lower(before, after) for before, after in pairwise(row))

        ours = list(grid["deepnorm"].values())
        if dead := [cell.text for cell in ours if cell.died]:
            return not_held(f"DeepNorm: {dead[0]}")
        if is_lower(ours[0], ours[-1]):
            return not_held(
                f"DeepNorm's loss is {ours[0].loss:.3f} at the smallest depth and {ours[-1].loss:.3f} at the greatest"
            )
        others = [method for method, cells in grid.items() if method != "deepnorm" and improves(cells)]
        if any(math.isnan(cell.error) for cell in ours) or not all(
            cell.ended for row in grid.values() for cell in row.values()
        ):
            return undecided("some runs had no time, or there is one seed")
        why = f"DeepNorm: {', '.join(cell.shown for cell in ours)}; as steady: {', '.join(others) or 'none'}"
        return held(why) if improves(grid["deepnorm"]) and len(others) <= (len(grid) - 1) / 2 else undecided(why)
