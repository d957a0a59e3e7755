"""R-Fixup: no norms; branches that start at zero, with learned scalar shifts and scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kilolayer.recipes.base import Constants, Depths, Learned, Place, Plan, Recipe, Side, Top
from kilolayer.recipes.init import InitName
from kilolayer.recipes.registry import register
from kilolayer.recipes.role import Role


@register
@dataclass(frozen=True)
class RFixup(Recipe):
    """Fixup adapted to Transformers: the last matrix of each branch starts at 0, the others start smaller in deeper models."""

    name: ClassVar[str] = "r_fixup"
    title: ClassVar[str] = "R-Fixup"
    equation: ClassVar[str] = "x' = x + s f(x + b);  W_o = W_2 = 0, W_q, W_k, W_v at L^-1/6 Xavier, W_1 at L^-1/2 Xavier"
    paper: ClassVar[str] = "Zhang, Dauphin and Ma 2019, Fixup Initialization"
    expect: ClassVar[str] = "28.4 BLEU at 18L-18L, 27.7 at 50L-50L, diverged at 100L-100L on WMT-17 (DeepNet, Table 1)."
    extension: ClassVar[str] = (
        "L counts every residual sublayer in the model: 2N + 3M, or twice the number of layers of a single stack. Linear "
        "layers have no bias, and an untied output table starts at 0. The uniform distribution is that of the authors' code, "
        "where query, key and value are at 1/sqrt(2) times the values above."
    )

    def constants(self, side: Side, depths: Depths) -> Constants:
        sublayers = sum(depths.sublayers(each) for each in depths.sides)
        return Constants(attention_gain=sublayers ** (-1 / 6), ffn_gain=sublayers ** (-1 / 2))

    def default_init(self, depths: Depths) -> InitName:
        return "xavier_uniform"

    def plan(self, place: Place) -> Plan:
        constants = self.constants(place.side, place.depths)
        gains = {
            Role.QUERY_KEY: constants.attention_gain,
            Role.VALUE: constants.attention_gain,
            Role.ATTENTION_OUTPUT: 0.0,
            Role.FFN_IN: constants.ffn_gain,
            Role.FFN_OUT: 0.0,
        }
        return Plan(branch=Learned(1.0, "scalar"), shifts=True, bias=False, gains=gains)

    def top(self, side: Side, depths: Depths) -> Top:
        return Top(shift=True, scale=side == "encoder")

    def vocabulary_gain(self) -> float:
        return 0.0
