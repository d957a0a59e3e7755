"""Linear maps that know their role."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kilolayer.layers.initialise import Noise
from kilolayer.recipes.base import Plan, Role


class Projection(nn.Module):
    """One matrix product that serves one projection or several at once, such as query, key and value.

    Each part is a projection of its own: it has a role, its own gain from the plan, and its own Xavier fan-out, unless it
    starts as a part of a matrix with `fan_out` rows.
    Shapes: weight [sum of the parts' rows, inputs]; bias [sum of the parts' rows], absent where the plan has none.
    """

    def __init__(self, inputs: int, parts: Sequence[tuple[Role, int]], plan: Plan, fan_out: int | None = None) -> None:
        super().__init__()
        self.parts, self.plan, self.fan_out = tuple(parts), plan, fan_out
        self.rows = [rows for _, rows in parts]
        self.weight = nn.Parameter(torch.empty(sum(self.rows), inputs))
        self.bias = nn.Parameter(torch.empty(sum(self.rows))) if plan.bias else None

    def fill(self, noise: Noise) -> None:
        for index, (matrix, (role, _)) in enumerate(zip(self.weight.split(self.rows), self.parts, strict=True)):
            noise.xavier_(matrix, self.plan.gain(role), self.plan.xavier, f"weight.{index}", self.fan_out)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., sum of rows], in the dtype of the weights."""
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)

    def extra_repr(self) -> str:
        return ", ".join(f"{role}: {rows} x {self.weight.shape[1]}" for role, rows in self.parts)


class PreciseProjection(Projection):
    """One that a lowered model leaves as it is."""
