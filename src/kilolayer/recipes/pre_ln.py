"""Pre-LN: the norm moved into the branch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kilolayer.recipes.base import NORM, Depths, Place, Plan, Recipe, Side, Top
from kilolayer.recipes.init import InitName
from kilolayer.recipes.registry import register


@register
@dataclass(frozen=True)
class PreLN(Recipe):
    """Each sublayer normalizes its input; the residual stream itself is normalized only by the final norm."""

    name: ClassVar[str] = "pre_ln"
    title: ClassVar[str] = "Pre-LN"
    equation: ClassVar[str] = "x' = x + f(LN(x));  final LN on top"
    paper: ClassVar[str] = "Wang et al. 2019, Learning Deep Transformer Models; Xiong et al. 2020"
    expect: ClassVar[str] = (
        "Stable up to 100L-100L, with 0.5 to 1.0 BLEU less than a Post-LN model that converges (DeepNet, section 5)."
    )

    bias: bool = True
    """Whether projections have biases; those of Llama and Qwen3 have none."""

    def default_init(self, depths: Depths) -> InitName:
        return "torch"

    def plan(self, place: Place) -> Plan:
        return Plan(pre_norm=NORM, bias=self.bias)

    def top(self, side: Side, depths: Depths) -> Top:
        return Top(norm=NORM)
