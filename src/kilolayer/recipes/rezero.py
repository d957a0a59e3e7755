"""ReZero: no norms, and branches that start at zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kilolayer.recipes.base import Learned, Place, Plan, Recipe
from kilolayer.recipes.registry import register


@register
@dataclass(frozen=True)
class ReZero(Recipe):
    """One learned scalar per layer, starting at 0, multiplies all branches of that layer."""

    name: ClassVar[str] = "rezero"
    title: ClassVar[str] = "ReZero"
    equation: ClassVar[str] = "x' = x + r f(x);  r learned, starts at 0, one per layer"
    paper: ClassVar[str] = "Bachlechner et al. 2020, ReZero Is All You Need"
    expect: ClassVar[str] = (
        "26.9 BLEU at 6L-6L, diverged at 18L-18L and deeper on WMT-17 (DeepNet, Table 1); unstable in half precision at any "
        "depth."
    )
    extension: ClassVar[str] = "The three sublayers of a decoder layer share its r."

    def plan(self, place: Place) -> Plan:
        return Plan(branch=Learned(0.0, "scalar", per="layer"))
