"""T-Fixup: neither norms nor warm-up, thanks to smaller initial weights and embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kilolayer.recipes.base import Constants, Depths, Place, Plan, Recipe, Side
from kilolayer.recipes.init import InitName
from kilolayer.recipes.registry import register
from kilolayer.recipes.role import VALUE_PATH


@register
@dataclass(frozen=True)
class TFixup(Recipe):
    """Value, output and FFN weights and the embeddings start smaller in deeper models."""

    name: ClassVar[str] = "t_fixup"
    title: ClassVar[str] = "T-Fixup"
    equation: ClassVar[str] = "x' = x + f(x);  encoder 0.67 N^-1/4 Xavier, decoder (9M)^-1/4 Xavier, embeddings (9N)^-1/4"
    paper: ClassVar[str] = "Huang et al. 2020, Improving Transformer Optimization Through Better Initialization"
    expect: ClassVar[str] = "Trains without warm-up; 28.4 BLEU at 18L-18L, diverged at 100L-100L on WMT-17 (DeepNet, Table 1)."
    extension: ClassVar[str] = (
        "Defined for an encoder-decoder. A single decoder has no cross-attention, so its layers are scaled like the "
        "encoder's: 0.67 M^-1/4. The uniform distribution is that of the authors' code. There query and key start at 1/sqrt(2) "
        "times Xavier, here at Xavier."
    )

    def constants(self, side: Side, depths: Depths) -> Constants:
        layers = depths.of(side)
        encoder_like = side == "encoder" or not depths.paired
        beta = 0.67 * layers ** (-1 / 4) if encoder_like else (9 * layers) ** (-1 / 4)
        return Constants(beta=beta, embedding_gain=self.embedding_gain(side, depths))

    def default_init(self, depths: Depths) -> InitName:
        return "xavier_uniform"

    def plan(self, place: Place) -> Plan:
        return Plan(gains=dict.fromkeys(VALUE_PATH, self.constants(place.side, place.depths).beta))

    def embedding_gain(self, side: Side, depths: Depths) -> float:
        return (9 * depths.of(side)) ** (-1 / 4)
