"""B2T: Post-LN in which the last norm of each layer also receives the layer's input."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

from kilolayer.recipes.base import NORM, Constants, Depths, Kind, LayerInput, Place, Plan, Recipe, Side
from kilolayer.recipes.registry import register
from kilolayer.recipes.role import EVERY_MATRIX, Role


@register
@dataclass(frozen=True)
class B2T(Recipe):
    """A residual connection from the bottom of each layer to its top that skips all of its norms except the last."""

    rescale: bool = False
    """Whether all matrices in the layers start at Xavier / sqrt(number of layers in the stack), as in the authors' code."""

    name: ClassVar[str] = "b2t"
    title: ClassVar[str] = "B2T connection"
    equation: ClassVar[str] = "x' = LN(x + f(x));  in the last sublayer of a layer x' = LN(x + f(x) + input of the layer)"
    paper: ClassVar[str] = (
        "Takase et al. 2022, B2T Connection: Serving Stability and Performance in Deep Transformers; "
        "github.com/takase/b2t_connection"
    )
    expect: ClassVar[str] = (
        "27.52 BLEU at 18L-18L, averaged over seven WMT En-De test sets, compared with 26.57 for Pre-LN (the authors' code, "
        "which also has a setting for 100L-100L)."
    )
    extension: ClassVar[str] = (
        "Checked against the authors' code, which always initializes as with rescale=True; whether the paper does so was not "
        "checked. Matrices are drawn from a normal distribution. The authors' code draws them from a uniform one, with the "
        "query, key and value matrices of attention initialized as in fairseq."
    )

    def constants(self, side: Side, depths: Depths) -> Constants:
        return Constants(beta=1 / sqrt(depths.of(side))) if self.rescale else Constants()

    def plan(self, place: Place) -> Plan:
        gains: dict[Role, float] = {role: 1 / sqrt(place.layers) for role in EVERY_MATRIX} if self.rescale else {}
        return Plan(out_norm=NORM, second_in=1.0 if place.kind is Kind.FEEDFORWARD else 0.0, gains=gains)

    def stream(self) -> LayerInput:
        return LayerInput()
