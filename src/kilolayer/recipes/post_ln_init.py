"""Post-LN-init: the model that DeepNet uses to analyse Post-LN's instability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kilolayer.recipes.base import NORM, Constants, Depths, Place, Plan, Recipe, Side
from kilolayer.recipes.registry import register
from kilolayer.recipes.role import EVERY_MATRIX


@register
@dataclass(frozen=True)
class PostLNInit(Recipe):
    """Post-LN with smaller initial weights in lower layers: those of layer l are divided by k_l = N - l + 1."""

    name: ClassVar[str] = "post_ln_init"
    title: ClassVar[str] = "Post-LN-init"
    equation: ClassVar[str] = "x' = LN(x + f(x));  every weight of layer l starts at Xavier / (N - l + 1)"
    paper: ClassVar[str] = "Wang et al. 2022, DeepNet, section 2"
    expect: ClassVar[str] = (
        "Converges at 18L-18L, where Post-LN does not (DeepNet, Figure 2); a tool for analysis rather than a training method."
    )
    extension: ClassVar[str] = "The decoder counts its own layers: M - l + 1."

    def constants(self, side: Side, depths: Depths) -> Constants:
        return Constants(first_layer_gain=1 / depths.of(side), last_layer_gain=1.0)

    def plan(self, place: Place) -> Plan:
        return Plan(out_norm=NORM, gains=dict.fromkeys(EVERY_MATRIX, 1 / (place.layers - place.layer + 1)))
