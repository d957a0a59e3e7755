"""DLCL: each layer reads a learned combination of all layers below it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kilolayer.recipes.base import NORM, Combination, Depths, NormSpec, Place, Plan, Recipe, Side, Top
from kilolayer.recipes.registry import register


@register
@dataclass(frozen=True)
class DLCL(Recipe):
    """Dynamic linear combination of layers, with Pre-LN or Post-LN sublayers."""

    norm: Literal["pre", "post"] = "pre"
    """Where the norms of the sublayers are; DeepNet compares with the pre-norm form."""

    name: ClassVar[str] = "dlcl"
    title: ClassVar[str] = "DLCL"
    equation: ClassVar[str] = (
        "pre: x_{l+1} = sum_k W[l+1,k] LN_k(y_k);  post: x_{l+1} = LN(sum_k W[l+1,k] y_k);  y_l = layer_l(x_l)"
    )
    paper: ClassVar[str] = "Wang et al. 2019, Learning Deep Transformer Models for Machine Translation"
    expect: ClassVar[str] = (
        "27.5 BLEU at 100L-100L, diverged at 50L-50L on WMT-17 (DeepNet, Table 1). The cost grows with the square of the depth."
    )
    extension: ClassVar[str] = (
        "Each row of W starts as an average. A decoder combines only its own layers, both in an encoder-decoder and as a "
        "single stack."
    )

    def plan(self, place: Place) -> Plan:
        return Plan(pre_norm=self._norm("pre"), out_norm=self._norm("post"))

    def top(self, side: Side, depths: Depths) -> Top:
        return Top(norm=self._norm("pre"))

    def stream(self) -> Combination:
        return Combination("each" if self.norm == "pre" else "sum")

    def _norm(self, where: Literal["pre", "post"]) -> NormSpec | None:
        return NORM if self.norm == where else None
