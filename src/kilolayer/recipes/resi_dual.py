"""ResiDual: Post-LN, and beside it a sum of all branches that no norm touches before the top."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kilolayer.config import bounded
from kilolayer.recipes.base import Place, Plan, Recipe, RunningSum
from kilolayer.recipes.registry import register


@register
@dataclass(frozen=True)
class ResiDual(Recipe):
    """Two residual streams: each sublayer reads and normalises one, and adds its branch to both."""

    scale: float = bounded(1.0, above=0, most=1)
    """Multiplies all that is added to the sum, against overflow in half precision; but for the norm's eps, no other effect."""

    name: ClassVar[str] = "resi_dual"
    title: ClassVar[str] = "ResiDual"
    equation: ClassVar[str] = "b = f(x);  x' = LN(x + b);  z' = z + s b, z_0 = s x_0;  on top x + LN(z)"
    paper: ClassVar[str] = (
        "Xie et al. 2023, ResiDual: Transformer with Dual Residual Connections; github.com/microsoft/ResiDual"
    )
    expect: ClassVar[str] = (
        "Its authors trained it at 6 and 12 layers a side on IWSLT and WMT, and deeper on OPUS-100. Early layers get larger "
        "gradients than late ones, as in Pre-LN. The second stream is one more state to keep in memory."
    )
    extension: ClassVar[str] = (
        "Checked against the authors' code. There the final norm has eps 1e-7, here the eps of all norms; their factor on x "
        "at the top, 1 unless set, is left out. A single stack has both streams too. The paper's scale for half precision was "
        "not checked: the published configurations leave it at 1."
    )

    def plan(self, place: Place) -> Plan:
        return Plan(out_norm=True, second_out=self.scale)

    def stream(self) -> RunningSum:
        return RunningSum(self.scale)
