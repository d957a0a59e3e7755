"""DeepNet, Table 1: ten methods at 6 to 100 layers per side."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kilolayer.report.table import Table
from kilolayer.reproduce.admin_table3 import ADMIN
from kilolayer.reproduce.base import Found, Verdict, held, not_held, register, undecided
from kilolayer.reproduce.cells import is_lower
from kilolayer.reproduce.sweep import Sweep, at_best_rate

if TYPE_CHECKING:
    from kilolayer.reproduce.lab import Lab

# Where paper and public code of a method differ, as its code does: DeepNet compared with these.
METHODS: tuple[Any, ...] = (
    "post_ln",
    {"name": "ds_init", "scaled": "variance"},
    ADMIN,
    "rezero",
    "r_fixup",
    "t_fixup",
    "pre_ln",
    "dlcl",
    "normformer",
    "deepnorm",
)
LAYERS, RATES, SEEDS = (6, 18, 50, 100), (5e-4, 1e-3, 2e-3, 4e-3), (1, 2, 3)


def recipes_by_depth(lab: Lab) -> Found:
    """Train every method at every depth; Figure 6 plots the same runs."""
    from kilolayer.reproduce.lab import combinations

    axes: dict[str, Any] = {"model.recipe": METHODS, "layers": LAYERS}
    if lab.tiny:
        axes = {"model.recipe": ("post_ln", "deepnorm"), "layers": (1, 2)}
    return at_best_rate(lab, "recipes-by-depth", lab.translation(), combinations(axes), RATES, SEEDS)


@register
class Table1(Sweep):
    """Which method survives which depth."""

    name = "deepnet-table1"
    claim = (
        "DeepNorm trains at every depth from 6L-6L to 100L-100L and is the best method at 50L-50L and 100L-100L, where Post-LN "
        "diverges."
    )
    setting = (
        "German to English, short sentences of Tatoeba (for WMT-17), dim 128, 1,000 steps of 4,096 tokens, 400 of them for "
        "warm-up, about one epoch. Each method at each depth trains at learning rates that differ by factors of 2, more of "
        "them where the best one is at an end of the grid, and at its two best rates with three seeds, whose mean validation "
        "loss decides between them. No run is ended early. Admin, DS-Init and NormFormer are as in their authors' code."
    )
    rule = (
        "Held if DeepNorm lives at every depth, no method has a clearly lower validation loss (two standard errors and 0.02 "
        "nats) at 50 and 100 layers per side, and Post-LN dies at 50 and 100. Not held if DeepNorm dies anywhere, a method is "
        "clearly lower at 50 or 100, or Post-LN lives at both. Otherwise it is undecided."
    )
    published = Table(
        ["BLEU, WMT-17 En-De", "6L-6L", "18L-18L", "50L-50L", "100L-100L"],
        [
            ["Post-LN", "28.1", "diverged", "diverged", "diverged"],
            ["DS-Init", "27.9", "diverged", "diverged", "diverged"],
            ["Admin", "27.9", "28.8", "diverged", "diverged"],
            ["ReZero", "26.9", "diverged", "diverged", "diverged"],
            ["R-Fixup", "27.5", "28.4", "27.7", "diverged"],
            ["T-Fixup", "27.5", "28.4", "27.9", "diverged"],
            ["Pre-LN", "27.0", "28.1", "28.0", "27.4"],
            ["DLCL", "27.4", "28.2", "diverged", "27.5"],
            ["NormFormer", "27.0", "28.3", "27.8", "diverged"],
            ["DeepNorm", "27.8", "28.8", "29.0", "28.9"],
        ],
    )

    def measure(self, lab: Lab) -> Found:
        return recipes_by_depth(lab)

    def judge(self, found: Found) -> Verdict:
        grid = self.grid(found)
        ours, plain = grid["deepnorm"], grid["post_ln"]
        depths = list(ours)
        deep = depths[len(depths) // 2 :]
        if dead := [depth for depth in depths if ours[depth].died]:
            return not_held(f"DeepNorm at {dead[0]} layers per side: {ours[dead[0]].text}")
        better = {(method, depth): is_lower(cells[depth], ours[depth]) for method, cells in grid.items() for depth in deep}
        if lower := [f"{method} at {depth}" for (method, depth), is_it in better.items() if is_it]:
            return not_held(f"clearly lower than DeepNorm: {', '.join(lower)}")
        if all(plain[depth].lives and not math.isnan(plain[depth].error) for depth in deep):
            return not_held(f"Post-LN lives at {' and '.join(map(str, deep))} layers per side")
        complete = all(cell.ended for cells in grid.values() for cell in cells.values())
        clear = all(is_it is not None for (method, depth), is_it in better.items() if grid[method][depth].lives)
        if complete and clear and all(ours[depth].lives for depth in depths) and all(plain[depth].died for depth in deep):
            return held(f"DeepNorm lives everywhere, none is clearly lower at {deep}, and Post-LN dies there")
        return undecided("some runs have no result or one seed, or Post-LN lives at one of the depths")
