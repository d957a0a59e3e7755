"""Linear maps y = W x + b that know their role in the layer, which decides how a recipe initializes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from kilolayer.layers.initialize import KeyedGenerator
from kilolayer.recipes.base import Plan
from kilolayer.recipes.role import Role


class Projection(nn.Linear):
    """One matrix product for one projection or several at once, such as query, key and value.

    Each part (role, rows) is initialized as a separate matrix: with the gain that the plan gives to its role, and with its own
    rows as Xavier fan-out, unless `fan_out` is given. As a subclass, it is an `nn.Linear` to tools that look for one.
    Shapes: weight [sum of rows, inputs]; bias [sum of rows], absent if the plan has no biases.
    """

    def __init__(self, inputs: int, parts: Sequence[tuple[Role, int]], plan: Plan, fan_out: int | None = None) -> None:
        rows = [rows for _, rows in parts]
        super().__init__(inputs, sum(rows), bias=plan.bias)
        self.parts, self.plan, self.fan_out, self.rows = tuple(parts), plan, fan_out, rows

    def reset_parameters(self, generator: KeyedGenerator | None = None) -> None:
        if not hasattr(self, "parts"):  # nn.Linear calls this before it is known how the weights start
            return
        generator = generator or KeyedGenerator()
        for index, (matrix, (role, _)) in enumerate(zip(self.weight.split(self.rows), self.parts, strict=True)):
            generator.draw_(matrix, self.plan, role, f"weight.{index}", fan_out=self.fan_out)
        if self.bias is not None:
            for index, (bias, (role, _)) in enumerate(zip(self.bias.split(self.rows), self.parts, strict=True)):
                generator.bias_(bias, self.plan, role, self.in_features, f"bias.{index}")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, the name in torch
        """[..., inputs] to [..., sum of rows], in the dtype of the weights."""
        return F.linear(input.to(self.weight.dtype), self.weight, self.bias)

    def extra_repr(self) -> str:
        return ", ".join(f"{role}: {rows} x {self.weight.shape[1]}" for role, rows in self.parts)


class PreciseProjection(Projection):
    """A projection that keeps its dtype when `Model.cast_weights` reduces the precision of a model."""
