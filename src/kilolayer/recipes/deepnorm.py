"""DeepNorm: Post-LN with larger residuals and smaller initial weights, so that model updates do not grow with depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kilolayer.config import bounded
from kilolayer.errors import OptionError
from kilolayer.recipes.base import NORM, Constants, Depths, Place, Plan, Recipe, Side
from kilolayer.recipes.registry import register
from kilolayer.recipes.role import VALUE_PATH


@register
@dataclass(frozen=True)
class DeepNorm(Recipe):
    """The residual is multiplied by alpha; value, attention output and FFN weights start at beta times Xavier."""

    alpha: Literal["derived", "one"] = "derived"
    """The factor on the residual: derived from the depth, or 1 in every stack (DeepNet, Table 11, "- DeepNorm")."""
    beta: Literal["derived", "one"] = "derived"
    """The factor on Xavier: derived from the depth, or 1 in every stack (DeepNet, Table 11, "- Initialization")."""
    alpha_scale: float = bounded(1.0, above=0, most=1e6)
    """Multiplies the derived alpha (DeepNet, Figure 9)."""
    beta_scale: float = bounded(1.0, above=0, most=1e6)
    """Multiplies the derived beta (DeepNet, Figure 9)."""

    name: ClassVar[str] = "deepnorm"
    title: ClassVar[str] = "DeepNorm"
    equation: ClassVar[str] = "x' = LN(alpha x + f(x));  W_v, W_o, W_1, W_2 start at beta Xavier"
    paper: ClassVar[str] = "Wang et al. 2022, DeepNet: Scaling Transformers to 1,000 Layers, section 3.3"
    expect: ClassVar[str] = (
        "Trained at 6 to 1,000 layers in the paper. Very deep models may need a large batch: others saw 100L-100L fail on "
        "WMT-17 with batches of 8 x 4,096 tokens and succeed with 128 x 4,096."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("alpha", "beta"):
            scale = getattr(self, f"{name}_scale")
            if getattr(self, name) == "one" and scale != 1:
                raise OptionError(f'{name}_scale = {scale:g} has no effect on {name} = "one"', fix="remove one of them")

    def constants(self, side: Side, depths: Depths) -> Constants:
        n, m = depths.encoder, depths.decoder
        if not depths.paired:
            alpha, beta = (2 * depths.of(side)) ** (1 / 4), (8 * depths.of(side)) ** (-1 / 4)
        elif side == "encoder":
            alpha, beta = 0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16)
        else:
            alpha, beta = (3 * m) ** (1 / 4), (12 * m) ** (-1 / 4)
        return Constants(
            alpha=1.0 if self.alpha == "one" else alpha * self.alpha_scale,
            beta=1.0 if self.beta == "one" else beta * self.beta_scale,
        )

    def plan(self, place: Place) -> Plan:
        constants = self.constants(place.side, place.depths)
        return Plan(out_norm=NORM, skip=constants.alpha, gains=dict.fromkeys(VALUE_PATH, constants.beta))
