"""NormFormer: Pre-LN with extra norms and scales that make gradients more even across depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kilolayer.errors import OptionError
from kilolayer.recipes.base import NORM, Depths, Kind, Learned, Place, Plan, Recipe, Side, Top
from kilolayer.recipes.init import InitName
from kilolayer.recipes.registry import register


@register
@dataclass(frozen=True)
class NormFormer(Recipe):
    """A scale on each head, a norm after attention, and a norm inside the FFN."""

    residual_scale: bool = False
    """Whether the FFN's residual is multiplied by a learned vector that starts at 1 (the paper's ResScale)."""
    cross_attention: bool = False
    """Whether cross-attention also gets a scale on each head and a norm after it, like self-attention."""

    name: ClassVar[str] = "normformer"
    title: ClassVar[str] = "NormFormer"
    equation: ClassVar[str] = (
        "x' = x + LN(concat(g_h head_h) W_o), head_h of LN(x);  x'' = [s .] x' + W_2 LN(phi(W_1 LN(x')));  final LN on top"
    )
    paper: ClassVar[str] = "Shleifer, Weston and Ott 2021, NormFormer"
    expect: ClassVar[str] = "28.3 BLEU at 18L-18L, 27.8 at 50L-50L, diverged at 100L-100L on WMT-17 (DeepNet, Table 1)."
    extension: ClassVar[str] = (
        "The paper has no cross-attention; its code in fairseq leaves cross-attention unchanged, and so does this recipe, "
        "unless `cross_attention` is set."
    )

    def check_depths(self, depths: Depths) -> None:
        if self.cross_attention and not depths.paired:
            raise OptionError(
                "cross_attention=True has no effect",
                where="recipe normformer, a model without cross-attention",
                fix="remove it",
            )

    def default_init(self, depths: Depths) -> InitName:
        return "fairseq" if depths.paired else "xavier"

    def plan(self, place: Place) -> Plan:
        if place.kind is Kind.FEEDFORWARD:
            skip = Learned(1.0, "vector") if self.residual_scale else 1.0
            return Plan(pre_norm=NORM, inner_norm=NORM, skip=skip)
        changed = place.kind is Kind.SELF_ATTENTION or self.cross_attention
        return Plan(pre_norm=NORM, post_norm=NORM if changed else None, head_scale=changed)

    def top(self, side: Side, depths: Depths) -> Top:
        return Top(norm=NORM)
