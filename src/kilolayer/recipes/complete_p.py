"""CompleteP: Pre-LN whose branches, learning rates, eps and weight decay scale with width and depth, so that settings transfer.

Written for embedding tables that start at N(0, 1/dim) and are multiplied by sqrt(dim) at the input. The authors' tables start
from the same distribution at every width and are not multiplied, and 1/m_N is applied before the output. A table divided by
sqrt(m_N), with its learning rate divided by sqrt(m_N) and its eps and weight decay multiplied by it, is equivalent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kilolayer.config import bounded
from kilolayer.errors import OptionError
from kilolayer.recipes.base import NORM, Constants, Depths, Part, Place, Plan, Rates, Recipe, Side, Top
from kilolayer.recipes.registry import register
from kilolayer.recipes.role import Role


@register
@dataclass(frozen=True)
class CompleteP(Recipe):
    """Settings tuned at a base width and depth hold at other sizes: m_N = dim / base_width, m_L = layers / base_depth."""

    base_width: int = bounded(256, least=1, most=2**20)
    """The width (dim) at which the learning rate, eps and weight decay are used as given."""
    base_depth: int = bounded(2, least=1, most=10_000)
    """The number of layers in a stack at which they are used as given and branches are not scaled."""
    alpha: float = bounded(1.0, least=0.5, most=1)
    """The exponent of depth in the scale of the branches: 1 is CompleteP, 1/2 is the depth-muP rule."""

    name: ClassVar[str] = "complete_p"
    title: ClassVar[str] = "CompleteP"
    equation: ClassVar[str] = "x' = x + m_L^-alpha f(LN(x));  final LN on top, times m_N^-1/2 before the vocabulary"
    paper: ClassVar[str] = (
        "Dey et al. 2025, Don't be lazy: CompleteP enables compute-efficient deep transformers; its public code"
    )
    expect: ClassVar[str] = (
        "The learning rate that is best for a small model should remain the best for deeper and wider ones: tune it on the "
        "small model, and set base_width and base_depth to that model's sizes."
    )
    extension: ClassVar[str] = (
        "The branch scale, learning rates, eps and weight decay are checked against the authors' code, which has one eps for "
        "all weights. The paper itself could not be read. The code divides attention scores by the width of a head, whereas "
        "Kilolayer divides by its square root: the rule is the same as long as the width of a head does not change. The "
        "initialization is Xavier's, whose standard deviation falls with the width as muP requires, provided that ffn_dim "
        "grows with dim. Encoder and decoder each have their own m_L; a shared embedding table uses the encoder's. Routers "
        "and heads, which the code does not have, follow the rule for matrices."
    )
    training: ClassVar[str] = (
        "Learning rate: matrices times m_L^(alpha - 1) / m_N; norms, biases and scales in layers times m_L^(alpha - 1); "
        "embedding tables times m_N^-1/2. Adam's eps: times 1 / (m_N m_L^alpha), for embedding tables times m_N^-1/2 "
        "m_L^-alpha. Weight decay: matrices times m_N, embedding tables times m_N^1/2. The rule is for AdamW."
    )

    def check_embeddings(self, scaled: bool) -> None:
        if not scaled:
            raise OptionError(
                "scale_embeddings=False makes the input of a wider model smaller, which CompleteP's rules do not cover",
                where="recipe complete_p",
                fix="remove scale_embeddings",
            )

    def constants(self, side: Side, depths: Depths) -> Constants:
        return Constants(branch=self._depth(side, depths) ** -self.alpha)

    def plan(self, place: Place) -> Plan:
        return Plan(pre_norm=NORM, branch=self.constants(place.side, place.depths).branch)

    def top(self, side: Side, depths: Depths) -> Top:
        return Top(norm=NORM)

    def output_factor(self, width: int) -> float:
        return (width / self.base_width) ** -0.5

    def rates(self, weight: Role | Part, side: Side, depths: Depths, width: int) -> Rates:
        wider, deeper = width / self.base_width, self._depth(side, depths)
        eps, by_depth = 1 / (wider * deeper**self.alpha), deeper ** (self.alpha - 1)
        match weight:
            case Role.HEAD:
                return Rates(1 / wider, eps, wider)
            case Role():
                return Rates(by_depth / wider, eps, wider)
            case Part.EMBEDDING | Part.VOCABULARY:
                return Rates(wider**-0.5, eps * wider**0.5, wider**0.5)
            case Part.NORM | Part.BIAS | Part.SCALE:
                return Rates(by_depth, eps)
            case _:
                return Rates(1.0, eps)

    def _depth(self, side: Side, depths: Depths) -> float:
        return depths.of(side) / self.base_depth
