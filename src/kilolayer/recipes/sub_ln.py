"""Sub-LN: Pre-LN with a second norm inside each sublayer (Magneto; DeepNet for Pre-LN)."""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt
from typing import ClassVar

from kilolayer.errors import OptionError
from kilolayer.recipes.base import NORM, Constants, Depths, Kind, Place, Plan, Recipe, Side, Top
from kilolayer.recipes.registry import register
from kilolayer.recipes.role import VALUE_PATH


@register
@dataclass(frozen=True)
class SubLN(Recipe):
    """Norms before the input and output projections; value, output and FFN weights start at gamma times Xavier."""

    cross_gain: bool = True
    """Whether the value and output projections of cross-attention are scaled too; TorchScale leaves them at Xavier."""

    name: ClassVar[str] = "sub_ln"
    title: ClassVar[str] = "Sub-LN"
    equation: ClassVar[str] = "x' = x + W_o LN(Attn(LN(x)));  x' = x + W_2 LN(phi(W_1 LN(x)));  final LN on top"
    paper: ClassVar[str] = "Wang et al. 2023, Magneto (ICML); DeepNet, section 4"
    expect: ClassVar[str] = (
        "Stable at every depth tried, up to 96 layers for language models (TorchScale, Figure 1). Weights start larger than "
        "Xavier (gamma > 1 from a few layers on)."
    )
    extension: ClassVar[str] = "Cross-attention has a norm before it but no inner norm."

    def check_depths(self, depths: Depths) -> None:
        if not self.cross_gain and not depths.paired:
            raise OptionError(
                "cross_gain=False has no effect", where="recipe sub_ln, a model without cross-attention", fix="remove it"
            )

    def constants(self, side: Side, depths: Depths) -> Constants:
        n, m = depths.encoder, depths.decoder
        if not depths.paired:
            gamma = sqrt(log(2 * depths.of(side)))
        elif side == "encoder":
            gamma = sqrt(log(3 * m) * log(2 * n) / 3)
        else:
            gamma = sqrt(log(3 * m))
        return Constants(gamma=gamma)

    def plan(self, place: Place) -> Plan:
        gamma = self.constants(place.side, place.depths).gamma
        cross = place.kind is Kind.CROSS_ATTENTION
        scaled = self.cross_gain or not cross
        return Plan(pre_norm=NORM, inner_norm=None if cross else NORM, gains=dict.fromkeys(VALUE_PATH, gamma) if scaled else {})

    def top(self, side: Side, depths: Depths) -> Top:
        return Top(norm=NORM)
