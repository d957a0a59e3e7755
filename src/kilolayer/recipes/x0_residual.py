"""x0-residual: Pre-LN whose layers scale the state and add the embedded input to it again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kilolayer.config import bounded
from kilolayer.recipes.base import NORM, Anchor, Depths, Learned, NormSpec, Place, Plan, Recipe, Side, Top
from kilolayer.recipes.registry import register

KEEP_RATE = 0.01  # factor on the learning rate, small because the product of all r below a layer scales its state


@register
@dataclass(frozen=True)
class X0Residual(Recipe):
    """Two learned numbers per layer, one that scales the state and one that scales the embedded input."""

    start: float = bounded(0.0, least=-1, most=1)
    """The initial value of c: 0 in the measurements in nanochat's log, 0.1 in its later code."""

    name: ClassVar[str] = "x0_residual"
    title: ClassVar[str] = "x0-residual"
    equation: ClassVar[str] = "x_0 = LN(embedding);  layer l reads r_l x + c_l x_0;  x' = x + f(LN(x));  final LN on top"
    paper: ClassVar[str] = "github.com/KellerJordan/modded-nanogpt; github.com/karpathy/nanochat, dev/LOG.md, January 2026"
    expect: ClassVar[str] = (
        "With it nanochat measured 0.0103 to 0.0039 fewer bits per byte, at 8 to 20 layers, at no cost. It starts as Pre-LN "
        "on normalized embeddings."
    )
    extension: ClassVar[str] = (
        "There is no paper; it is checked against copies of nanochat's code. There x_0 is the token's embedding after an RMS "
        "norm, without positions; here it is the input of the first layer, with input positions and dropout. Norms are those "
        "of the model (nanochat: norm = 'rms', without gains), matrices start at Xavier (nanochat: the projections that end a "
        "branch start at 0), and c has the same learning rate as other weights (nanochat: 0.5, with Adam's beta1 at 0.96). "
        "Encoders and encoder-decoders are an extension."
    )
    training: ClassVar[str] = (
        "r (`keep`) learns at 1/100 of the learning rate; c (`add`) learns at the full rate, like other weights."
    )

    def plan(self, place: Place) -> Plan:
        return Plan(pre_norm=NORM)

    def top(self, side: Side, depths: Depths) -> Top:
        return Top(norm=NORM)

    def input_norm(self, side: Side, depths: Depths) -> NormSpec:
        return NORM

    def stream(self) -> Anchor:
        return Anchor(keep=Learned(1.0, "scalar", rate=KEEP_RATE), add=Learned(self.start, "scalar"))
