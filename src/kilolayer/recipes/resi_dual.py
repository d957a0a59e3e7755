"""ResiDual: Post-LN plus a second residual stream, the sum of all branches, that is normalized only at the top."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kilolayer.config import bounded
from kilolayer.recipes.base import NORM, Place, Plan, Recipe, RunningSum
from kilolayer.recipes.registry import register


@register
@dataclass(frozen=True)
class ResiDual(Recipe):
    """Two residual streams: each sublayer reads and normalizes one, and adds its branch to both."""

    scale: float = bounded(1.0, above=0, most=1)
    """Multiplies everything added to the sum, to avoid overflow in half precision. It has no other effect, except through the
    norm's eps."""

    name: ClassVar[str] = "resi_dual"
    title: ClassVar[str] = "ResiDual"
    equation: ClassVar[str] = "b = f(x);  x' = LN(x + b);  z' = z + s b, z_0 = s x_0;  on top x + LN(z)"
    paper: ClassVar[str] = (
        "Xie et al. 2023, ResiDual: Transformer with Dual Residual Connections; github.com/microsoft/ResiDual"
    )
    expect: ClassVar[str] = (
        "Its authors trained it with 6 and 12 layers per stack on IWSLT and WMT, and with more on OPUS-100. Early layers get "
        "larger gradients than late ones, as in Pre-LN. The second stream is an additional state to keep in memory."
    )
    extension: ClassVar[str] = (
        "Checked against the authors' code. There the final norm has an eps of 1e-7, whereas here it has the same eps as all "
        "other norms; their factor on x at the top, 1 unless set, is left out. A single stack has both streams too. The "
        "paper's scale for half precision was not checked: the published configurations leave it at 1."
    )

    def plan(self, place: Place) -> Plan:
        return Plan(out_norm=NORM, second_out=self.scale)

    def stream(self) -> RunningSum:
        return RunningSum(self.scale)
