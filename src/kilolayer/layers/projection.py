"""Linear maps that know their role."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from kilolayer.layers.initialise import Noise
from kilolayer.recipes.base import Plan, Role


class Projection(nn.Linear):
    """One matrix product that serves one projection or several at once, such as query, key and value.

    Each part is a projection of its own: it has a role, its own gain from the plan, and its own Xavier fan-out, unless it
    starts as a part of a matrix with `fan_out` rows. It is an `nn.Linear` to tools that look for one.
    Shapes: weight [sum of the parts' rows, inputs]; bias [sum of the parts' rows], absent where the plan has none.
    """

    def __init__(self, inputs: int, parts: Sequence[tuple[Role, int]], plan: Plan, fan_out: int | None = None) -> None:
        rows = [rows for _, rows in parts]
        super().__init__(inputs, sum(rows), bias=plan.bias)
        self.parts, self.plan, self.fan_out, self.rows = tuple(parts), plan, fan_out, rows

    def reset_parameters(self) -> None:
        """Nothing: `fill` knows how it starts. torch's own would draw numbers from the default generator."""

    def fill(self, noise: Noise) -> None:
        for index, (matrix, (role, _)) in enumerate(zip(self.weight.split(self.rows), self.parts, strict=True)):
            noise.xavier_(matrix, self.plan.gain(role), self.plan.xavier, f"weight.{index}", self.fan_out)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, the name in torch
        """[..., inputs] to [..., sum of rows], in the dtype of the weights."""
        return F.linear(input.to(self.weight.dtype), self.weight, self.bias)

    def extra_repr(self) -> str:
        return ", ".join(f"{role}: {rows} x {self.weight.shape[1]}" for role, rows in self.parts)


class PreciseProjection(Projection):
    """One that a lowered model leaves as it is."""
