"""DS-Init: Post-LN with smaller initial weights in higher layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kilolayer.config import bounded
from kilolayer.recipes.base import NORM, Constants, Depths, Place, Plan, Recipe, Side
from kilolayer.recipes.init import InitName
from kilolayer.recipes.registry import register
from kilolayer.recipes.role import EVERY_MATRIX


@register
@dataclass(frozen=True)
class DSInit(Recipe):
    """Every matrix of layer l starts at Xavier times alpha / sqrt(l)."""

    alpha: float = bounded(1.0, above=0, most=1)
    """The paper's alpha, in (0, 1]."""
    scaled: Literal["deviation", "variance"] = "deviation"
    """What is multiplied: the standard deviation, as in the paper, or the variance, as in its public code."""

    name: ClassVar[str] = "ds_init"
    title: ClassVar[str] = "DS-Init"
    equation: ClassVar[str] = "x' = LN(x + f(x));  every matrix of layer l starts at (alpha / sqrt(l)) Xavier"
    paper: ClassVar[str] = "Zhang, Titov and Sennrich 2019, Improving Deep Transformer with Depth-Scaled Initialization"
    expect: ClassVar[str] = "27.9 BLEU at 6L-6L, diverged at 18L-18L and deeper on WMT-17 (DeepNet, Table 1)."
    extension: ClassVar[str] = (
        "Encoder and decoder count their layers separately, from 1. The uniform distribution is the paper's and its code's."
    )

    def constants(self, side: Side, depths: Depths) -> Constants:
        return Constants(first_layer_gain=self._gain(1), last_layer_gain=self._gain(depths.of(side)))

    def default_init(self, depths: Depths) -> InitName:
        return "xavier_uniform"

    def plan(self, place: Place) -> Plan:
        return Plan(out_norm=NORM, gains=dict.fromkeys(EVERY_MATRIX, self._gain(place.layer)))

    def _gain(self, layer: int) -> float:
        factor = self.alpha / layer**0.5
        return factor if self.scaled == "deviation" else factor**0.5
