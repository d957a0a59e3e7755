"""Admin: Post-LN with residuals scaled by values measured in a profiling pass."""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt
from typing import ClassVar, Literal

from kilolayer.errors import OptionError
from kilolayer.recipes.base import NORM, Constants, Depths, Learned, Place, Plan, Recipe, Side
from kilolayer.recipes.init import InitName
from kilolayer.recipes.registry import register


@register
@dataclass(frozen=True)
class Admin(Recipe):
    """Each residual is multiplied by a vector w, set from the variances of the branches below it."""

    start: Literal["paper", "released", "closed"] = "paper"
    """How w is initialized. "paper": with the formula of Very Deep Transformers, section 3, from the sum of the branches'
    variances. "released": as in the authors' code, with its running variance, its initial weights and a trained w.
    "closed": with a closed form that needs no data."""
    weight: Literal["derived", "fixed", "trainable"] = "derived"
    """Whether w is trained. "derived": it stays fixed, as in Very Deep Transformers, unless start is "released", where it is
    always trained."""

    name: ClassVar[str] = "admin"
    title: ClassVar[str] = "Admin"
    equation: ClassVar[str] = "x_{i+1} = LN(w_i . x_i + f_i(x_i))"
    paper: ClassVar[str] = "Liu et al. 2020, Very Deep Transformers for NMT; Liu et al. 2020, Understanding the Difficulty"
    expect: ClassVar[str] = (
        "60L-12L reached 43.8 BLEU on WMT'14 En-Fr, 2.5 above 6L-6L. At 50L-50L and deeper it diverged in DeepNet's Table 1."
    )
    extension: ClassVar[str] = (
        "Encoder and decoder are profiled separately; a single stack is profiled in the same way. For the first w the formula "
        "gives 0, an empty sum, which would remove the embedding from the first residual. Here it is 1; the paper does not "
        "say what its runs used. The second w may be smaller than Post-LN's 1 (0.75 at 18L-18L, width 64). In the released "
        "code the first w is 1 and no later one is smaller. Both forms are profiled on one batch of about 8,000 tokens (the "
        "paper's footnote 5), which training builds from its first batches."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start == "released" and self.weight != "derived":
            raise OptionError(
                f'weight = "{self.weight}" has no effect on start = "released", whose w is trained', fix="remove one of them"
            )

    def constants(self, side: Side, depths: Depths) -> Constants:
        return Constants(omega=self._closed(side, depths)) if self.start == "closed" else Constants()

    def notes(self, depths: Depths) -> tuple[str, ...]:
        start = {
            "released": "w_1 = 1, then w_{i+1}^2 = Var(w_i x_i) + Var(f_i(x_i)), each applied during the same profiling pass. "
            "Run kilolayer.calibrate(model, batch) before training.",
            "paper": "w_i = sqrt(sum over j < i of Var f_j), profiled with w = 1; the formula's w_1 = 0 is replaced by 1, "
            "because 0 would remove the first residual and could not be folded. "
            "Run kilolayer.calibrate(model, batch) before training.",
            "closed": "omega = sqrt((n + 1) / ln(n + 1) - 1), "
            "where n is the number of residual sublayers in the stack; no profiling is needed.",
        }[self.start]
        return (start, *super().notes(depths))

    def default_init(self, depths: Depths) -> InitName:
        return "fairseq_0.8" if self.start == "released" else "xavier_uniform"

    def plan(self, place: Place) -> Plan:
        start = self._closed(place.side, place.depths) if self.start == "closed" else 1.0
        released = self.start == "released"
        omega = Learned(start, "vector", trainable=released or self.weight == "trainable")
        return Plan(out_norm=NORM, skip=omega)

    def calibration(self) -> Literal["running", "summed"] | None:
        return {"released": "running", "paper": "summed", "closed": None}[self.start]

    def _closed(self, side: Side, depths: Depths) -> float:
        n = depths.sublayers(side)
        return sqrt((n + 1) / log(n + 1) - 1)
