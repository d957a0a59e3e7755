"""Linear maps that know their role."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kilolayer.layers.initialise import Noise
from kilolayer.operators.few_rows import linear
from kilolayer.recipes.base import Plan, Role


class Projection(nn.Module):
    """One matrix product that serves one projection or several at once, such as query, key and value.

    Each part is a projection of its own: it has a role, its own Xavier fan-out, and its own gain from the plan.
    Shapes: weight [sum of the parts' rows, inputs]; bias [sum of the parts' rows], absent where the plan has none.
    """

    def __init__(
        self,
        inputs: int,
        parts: Sequence[tuple[Role, int]],
        plan: Plan,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.parts, self.plan = tuple(parts), plan
        self.rows = [rows for _, rows in parts]
        self.weight = nn.Parameter(torch.empty(sum(self.rows), inputs, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(sum(self.rows), device=device, dtype=dtype)) if plan.bias else None

    def fill(self, noise: Noise) -> None:
        for index, (matrix, (role, _)) in enumerate(zip(self.weight.split(self.rows), self.parts, strict=True)):
            noise.xavier_(matrix, self.plan.gain(role), self.plan.xavier, key=f"weight.{index}")
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor, *, biased: bool = True) -> Tensor:
        """[..., inputs] to [..., sum of rows], in the dtype of the weights; with `biased=False` the bias is the caller's."""
        return linear(x.to(self.weight.dtype), self.weight, self.bias if biased else None)

    def extra_repr(self) -> str:
        return ", ".join(f"{role}: {rows} x {self.weight.shape[1]}" for role, rows in self.parts)
