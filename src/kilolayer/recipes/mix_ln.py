"""Mix-LN: Post-LN in the lowest layers, Pre-LN above them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kilolayer.config import bounded
from kilolayer.recipes.base import NORM, Constants, Depths, Place, Plan, Recipe, Side, Top
from kilolayer.recipes.registry import register


@register
@dataclass(frozen=True)
class MixLN(Recipe):
    """The first quarter of the layers is Post-LN, the rest Pre-LN."""

    share: float = bounded(0.25, above=0, below=1)
    """The share of layers, counted from the first, that are Post-LN; at least one layer always is."""

    name: ClassVar[str] = "mix_ln"
    title: ClassVar[str] = "Mix-LN"
    equation: ClassVar[str] = "l <= L / 4: x' = LN(x + f(x));  above: x' = x + f(LN(x));  final LN on top"
    paper: ClassVar[str] = (
        "Li, Yin and Liu 2024, Mix-LN: Unleashing the Power of Deeper Layers (arXiv 2412.13795); its public code"
    )
    expect: ClassVar[str] = (
        "Gradients are more even across depth than with Pre-LN or Post-LN, in language models of 71 million to 7 billion "
        "parameters. The Post-LN part keeps Post-LN's limits, so very deep stacks need a smaller share."
    )
    extension: ClassVar[str] = (
        "Checked against the authors' code, which takes the number of Post-LN layers: 3 of 12, 6 of 24. Here the option is "
        "the share of the layers, rounded down to whole layers, with a minimum of one. Encoder and decoder each have their "
        "own Post-LN layers."
    )

    def constants(self, side: Side, depths: Depths) -> Constants:
        return Constants(post_layers=float(self._post_layers(side, depths)))

    def plan(self, place: Place) -> Plan:
        post = place.layer <= self._post_layers(place.side, place.depths)
        return Plan(out_norm=NORM) if post else Plan(pre_norm=NORM)

    def top(self, side: Side, depths: Depths) -> Top:
        return Top(norm=NORM)

    def _post_layers(self, side: Side, depths: Depths) -> int:
        return max(1, int(self.share * depths.of(side) + 1e-6))  # 0.29 * 100 is 28.999...
