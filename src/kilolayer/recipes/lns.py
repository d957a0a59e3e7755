"""LayerNorm scaling: Pre-LN whose branches read a smaller input the deeper they are."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

from kilolayer.recipes.base import NORM, Constants, Depths, PerLayer, Place, Plan, Recipe, Side, Top
from kilolayer.recipes.registry import register


@register
@dataclass(frozen=True)
class LayerNormScaling(Recipe):
    """The output of each norm is divided by the square root of its layer's number."""

    name: ClassVar[str] = "lns"
    title: ClassVar[str] = "LayerNorm scaling"
    equation: ClassVar[str] = "x' = x + f(LN(x) / sqrt(l)), l = layer number, counted from 1;  final LN on top"
    paper: ClassVar[str] = "Sun et al. 2025, The Curse of Depth in Large Language Models (NeurIPS); its public code"
    expect: ClassVar[str] = (
        "It keeps the variance of the residual stream from growing with depth, so that deep layers change it more; the paper "
        "has language models of up to 7 billion parameters. nanochat saw no gain with Muon and output projections that start "
        "at 0."
    )
    extension: ClassVar[str] = (
        "Checked against the authors' code, whose switch compares a lower-cased name with 'LNS' and therefore never turns the "
        "method on. Its authors warn against combining it with initializations that also shrink with depth. Encoder and "
        "decoder count their layers separately, from 1, and cross-attention is scaled like self-attention."
    )

    def constants(self, side: Side, depths: Depths) -> Constants:
        return Constants(first_layer_scale=1.0, last_layer_scale=1 / sqrt(depths.of(side)))

    def plan(self, place: Place) -> Plan:
        return Plan(pre_norm=NORM, in_scale=PerLayer(1 / sqrt(place.layer)))

    def top(self, side: Side, depths: Depths) -> Top:
        return Top(norm=NORM)
