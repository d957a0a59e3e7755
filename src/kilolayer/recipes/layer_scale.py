"""LayerScale: Pre-LN with branches whose channels all start close to zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kilolayer.config import bounded
from kilolayer.recipes.base import NORM, Constants, Depths, Learned, Place, Plan, Recipe, Side, Top
from kilolayer.recipes.registry import register


@register
@dataclass(frozen=True)
class LayerScale(Recipe):
    """A learned vector on each branch, with a smaller initial value in deeper stacks."""

    start: float | None = bounded(None, above=0, most=1)
    """The initial value of the vectors. If absent, derived from the depth, as in the paper."""

    name: ClassVar[str] = "layer_scale"
    title: ClassVar[str] = "LayerScale"
    equation: ClassVar[str] = (
        "x' = x + s . f(LN(x));  s learned, starts at 0.1 up to 18 layers, 1e-5 up to 24, 1e-6 above;  final LN on top"
    )
    paper: ClassVar[str] = "Touvron et al. 2021, Going Deeper with Image Transformers (CaiT)"
    expect: ClassVar[str] = (
        "It made image classifiers of 36 and 48 layers trainable; it was not designed for translation or language models."
    )
    extension: ClassVar[str] = (
        "The initial values are checked against public implementations of CaiT. The depths are those of one stack: encoder "
        "and decoder each use their own. Cross-attention has a vector just as self-attention does."
    )

    def constants(self, side: Side, depths: Depths) -> Constants:
        return Constants(start=self._start(depths.of(side)))

    def plan(self, place: Place) -> Plan:
        return Plan(pre_norm=NORM, branch=Learned(self._start(place.layers), "vector"))

    def top(self, side: Side, depths: Depths) -> Top:
        return Top(norm=NORM)

    def _start(self, layers: int) -> float:
        if self.start is not None:
            return self.start
        return 0.1 if layers <= 18 else 1e-5 if layers <= 24 else 1e-6
