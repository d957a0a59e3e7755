"""The experts of one layer: feed-forward networks side by side, each applied to the rows that are sent to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kilolayer.layers.feedforward import ACTIVATIONS
from kilolayer.layers.initialise import Noise
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.scale import make_shift
from kilolayer.operators.grouped import Groups, grouped_product, multiply_groups, spread
from kilolayer.operators.grouped_norm import can_fuse_grouped_norm, grouped_relu_norm
from kilolayer.recipes.base import Plan, Role


class ExpertProjection(nn.Module):
    """A projection for each expert, all of one role: each has the Xavier fan and the gain of a dense one.

    Shapes: weight [experts, parts * outputs, inputs]; bias [experts, parts * outputs], absent where the plan has none.
    first: the number of the first expert that is held here; other processes may hold those before and behind.
    """

    def __init__(
        self,
        experts: int,
        inputs: int,
        parts: Sequence[tuple[Role, int]],
        plan: Plan,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.parts, self.plan, self.first = tuple(parts), plan, 0
        self.rows = [rows for _, rows in parts]
        self.weight = nn.Parameter(torch.empty(experts, sum(self.rows), inputs, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(experts, sum(self.rows), device=device, dtype=dtype)) if plan.bias else None

    def fill(self, noise: Noise) -> None:
        for expert, matrices in enumerate(self.weight, self.first):
            for index, (matrix, (role, _)) in enumerate(zip(matrices.split(self.rows), self.parts, strict=True)):
                noise.xavier_(matrix, self.plan.gain(role), self.plan.xavier, key=f"weight.{expert}.{index}")
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, rows: Tensor, groups: Groups) -> Tensor:
        """[rows, inputs] to [rows, parts * outputs], in the dtype of the weights."""
        product = multiply_groups(rows.to(self.weight.dtype), self.weight, groups)
        return product if self.bias is None else product + spread(self.bias, groups)

    def extra_repr(self) -> str:
        experts, _, inputs = self.weight.shape
        return ", ".join(f"{experts} x {role}: {rows} x {inputs}" for role, rows in self.parts)


class ExpertNorm(nn.Module):
    """A norm for each expert, over the last axis: weight [experts, size], and bias unless it is RMSNorm."""

    def __init__(
        self,
        experts: int,
        size: int,
        options: LayerOptions,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = options.norm_eps
        self.weight = nn.Parameter(torch.empty(experts, size, device=device, dtype=dtype))
        layer = options.norm == "layer"
        self.bias = nn.Parameter(torch.empty(experts, size, device=device, dtype=dtype)) if layer else None

    def fill(self, noise: Noise) -> None:
        self.weight.fill_(1.0)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, rows: Tensor, groups: Groups) -> Tensor:
        """[rows, size] to the same, in the dtype of the weights."""
        rows, size = rows.to(self.weight.dtype), self.weight.shape[1:]
        gain = spread(self.weight, groups)
        if self.bias is None:
            return F.rms_norm(rows, size, eps=self.eps) * gain
        return F.layer_norm(rows, size, eps=self.eps) * gain + spread(self.bias, groups)

    def is_fused(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether grouped_norm.py serves it behind products in `dtype`."""
        return can_fuse_grouped_norm(device, self.weight.dtype, dtype, self.weight.shape[1])


class Unnormed(nn.Module):
    """The rows as they are, where the recipe has no norm inside."""

    def forward(self, rows: Tensor, groups: Groups) -> Tensor:
        return rows


class Experts(nn.Module):
    """W_2e phi(W_1e x) for the rows x of expert e, with the inner norm and the shifts of the plan."""

    def __init__(
        self,
        experts: int,
        options: LayerOptions,
        plan: Plan,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        parts = [(Role.FFN_IN, options.ffn_dim)] * (2 if options.activation == "swiglu" else 1)
        self.input_shift = make_shift(plan.shifts, device, dtype)
        self.input = ExpertProjection(experts, options.dim, parts, plan, device, dtype)
        self.activation_shift = make_shift(plan.shifts, device, dtype)
        self.activation = ACTIVATIONS[options.activation]()
        self.dropout = nn.Dropout(options.activation_dropout) if options.activation_dropout else nn.Identity()
        self.inner_norm = ExpertNorm(experts, options.ffn_dim, options, device, dtype) if plan.inner_norm else Unnormed()
        self.is_bare_relu = options.activation == "relu" and not plan.shifts and not options.activation_dropout
        self.output_shift = make_shift(plan.shifts, device, dtype)
        self.output = ExpertProjection(experts, options.ffn_dim, [(Role.FFN_OUT, options.dim)], plan, device, dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrix products."""
        return self.input.weight.dtype

    def forward(self, rows: Tensor, groups: Groups) -> Tensor:
        """[rows, dim] to the same."""
        return self.output(self.output_shift(self._widen(self.input_shift(rows), groups)), groups)

    def _widen(self, rows: Tensor, groups: Groups) -> Tensor:
        """N_e( phi(W_1e x) ), with dropout before the norm."""
        norm, weight = self.inner_norm, self.input.weight
        if not (self.is_bare_relu and isinstance(norm, ExpertNorm) and norm.is_fused(rows.device, weight.dtype)):
            hidden = self.activation(self.activation_shift(self.input(rows, groups)))
            return norm(self.dropout(hidden), groups)
        product = grouped_product(rows.to(weight.dtype), weight, groups.ends, True)
        return grouped_relu_norm(product, *groups, self.input.bias, norm.weight, norm.bias, norm.eps)[0]
