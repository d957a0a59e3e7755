"""ReZero: no norm, and branches that start switched off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kilolayer.recipes.base import Learned, Place, Plan, Recipe
from kilolayer.recipes.registry import register


@register
@dataclass(frozen=True)
class ReZero(Recipe):
    """One learned scalar a layer, starting at 0, on all branches of that layer."""

    name: ClassVar[str] = "rezero"
    title: ClassVar[str] = "ReZero"
    equation: ClassVar[str] = "x' = x + r f(x);  r learned, starts at 0, one a layer"
    paper: ClassVar[str] = "Bachlechner et al. 2020, ReZero Is All You Need"
    expect: ClassVar[str] = (
        "26.9 BLEU at 6L-6L, diverged from 18L-18L on WMT-17 (DeepNet, Table 1); unstable in half precision at any depth."
    )
    extension: ClassVar[str] = "A decoder layer's three sublayers share its r."

    def plan(self, place: Place) -> Plan:
        return Plan(branch=Learned(0.0, "scalar", per="layer"))
