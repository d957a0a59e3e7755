"""Keel: Post-LN with a residual that outweighs the branch in proportion to the depth of the stack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kilolayer.recipes.base import NORM, Constants, Depths, Place, Plan, Recipe, Side
from kilolayer.recipes.registry import register


@register
@dataclass(frozen=True)
class Keel(Recipe):
    """A second norm inside the branch, and a residual multiplied by the number of residual sublayers."""

    name: ClassVar[str] = "keel"
    title: ClassVar[str] = "Keel"
    equation: ClassVar[str] = "x' = LN(alpha x + f(LN(x)));  alpha = number of residual sublayers in the stack"
    paper: ClassVar[str] = "Chen and Wei 2026, Post-LayerNorm Is Back: Stable, Expressive, and Deep (arXiv 2601.19895)"
    expect: ClassVar[str] = (
        "The paper trains language models of more than 1,000 layers at larger learning rates than Pre-LN's; no independent "
        "replication is known."
    )
    extension: ClassVar[str] = (
        "The equation and alpha follow public descriptions of the paper and re-implementations. The paper itself and its "
        "authors' code could not be read, so if the paper treats the first layer differently, that is missing here. The paper "
        "states the method for one stack; here encoder and decoder each count their own sublayers, 2N and 3M."
    )

    def constants(self, side: Side, depths: Depths) -> Constants:
        return Constants(alpha=float(depths.sublayers(side)))

    def plan(self, place: Place) -> Plan:
        return Plan(pre_norm=NORM, out_norm=NORM, skip=self.constants(place.side, place.depths).alpha)
