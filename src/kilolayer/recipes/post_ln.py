"""Post-LN: the original Transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kilolayer.recipes.base import NORM, Depths, Place, Plan, Recipe
from kilolayer.recipes.init import InitName
from kilolayer.recipes.registry import register


@register
@dataclass(frozen=True)
class PostLN(Recipe):
    """The norm is applied to the sum of the residual and the branch."""

    name: ClassVar[str] = "post_ln"
    title: ClassVar[str] = "Post-LN"
    equation: ClassVar[str] = "x' = LN(x + f(x))"
    paper: ClassVar[str] = "Vaswani et al. 2017, Attention Is All You Need"
    expect: ClassVar[str] = (
        "Trains with up to about 6 layers per stack with warm-up; at 18L-18L it diverged on WMT-17 (DeepNet, Table 1)."
    )

    def default_init(self, depths: Depths) -> InitName:
        return "torch" if depths.paired else "bert"

    def plan(self, place: Place) -> Plan:
        return Plan(out_norm=NORM)
