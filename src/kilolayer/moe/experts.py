"""The experts of one layer: feed-forward networks with stacked weights, each applied to the rows that are sent to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kilolayer.errors import OptionError
from kilolayer.layers.feedforward import ACTIVATIONS
from kilolayer.layers.initialize import KeyedGenerator
from kilolayer.layers.norms.base import Norm, norm_class
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.scale import make_shift
from kilolayer.moe.groups import Groups, multiply_groups, spread
from kilolayer.recipes.base import NormSpec, Plan
from kilolayer.recipes.role import Role


class ExpertProjection(nn.Module):
    """One projection per expert, each initialized like a dense `Projection` with the same parts.

    Shapes: weight [experts, sum of rows, inputs]; bias [experts, sum of rows], absent if the plan has no biases.
    first: the number of the first expert held here; other processes may hold the others.
    """

    def __init__(
        self,
        experts: int,
        inputs: int,
        parts: Sequence[tuple[Role, int]],
        plan: Plan,
    ) -> None:
        super().__init__()
        self.parts, self.plan, self.first = tuple(parts), plan, 0
        self.rows = [rows for _, rows in parts]
        self.weight = nn.Parameter(torch.empty(experts, sum(self.rows), inputs))
        self.bias = nn.Parameter(torch.empty(experts, sum(self.rows))) if plan.bias else None

    def reset_parameters(self, generator: KeyedGenerator | None = None) -> None:
        generator = generator or KeyedGenerator()
        for expert, matrices in enumerate(self.weight, self.first):
            for index, (matrix, (role, _)) in enumerate(zip(matrices.split(self.rows), self.parts, strict=True)):
                generator.draw_(matrix, self.plan, role, f"weight.{expert}.{index}")
        for expert, biases in enumerate(() if self.bias is None else self.bias, self.first):
            for index, (bias, (role, _)) in enumerate(zip(biases.split(self.rows), self.parts, strict=True)):
                generator.bias_(bias, self.plan, role, self.weight.shape[-1], f"bias.{expert}.{index}")

    def forward(self, rows: Tensor, groups: Groups) -> Tensor:
        """[rows, inputs] to [rows, outputs], in the dtype of the weights; groups: which rows belong to which expert."""
        product = multiply_groups(rows.to(self.weight.dtype), self.weight, groups)
        return product if self.bias is None else product + spread(self.bias, groups)

    def extra_repr(self) -> str:
        experts, _, inputs = self.weight.shape
        return ", ".join(f"{experts} x {role}: {rows} x {inputs}" for role, rows in self.parts)


class ExpertNorm(Norm):
    """One norm per expert, over the last axis: weight [experts, size]; bias [experts, size], absent for RMSNorm."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, spec: NormSpec, experts: int, size: int, options: LayerOptions) -> None:
        super().__init__()
        self.kind = norm_class(options.norm if spec.kind is None else spec.kind)
        if self.kind.normalize is Norm.normalize:
            raise OptionError(
                f"experts cannot have {self.kind.words()} inside, because this class has no `normalize`",
                fix="define it, or choose a recipe without inner norms",
            )
        self.eps = options.norm_eps if spec.eps is None else spec.eps
        self.weight = nn.Parameter(torch.empty(experts, size))
        self.bias = nn.Parameter(torch.empty(experts, size)) if self.kind.has_bias else None

    def reset_parameters(self) -> None:
        self.weight.fill_(1.0)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, rows: Tensor, groups: Groups) -> Tensor:
        """[rows, size] to the same shape, in the dtype of the weights."""
        return self.scaled(rows, spread(self.weight, groups), None if self.bias is None else spread(self.bias, groups))

    def scaled(self, rows: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
        """As `forward`, with the gain and bias of each row: [rows, size] each."""
        normed = self.kind.normalize(rows.to(self.weight.dtype), self.eps) * gain
        return normed if bias is None else normed + bias


class Unnormed(nn.Module):
    """Returns the rows unchanged, for recipes without an inner norm."""

    def forward(self, rows: Tensor, groups: Groups) -> Tensor:
        return rows


class Experts(nn.Module):
    """W_2e N_e(phi(W_1e x)) for the rows x of expert e: [rows, dim] to [rows, dim].

    The inner norm N_e and the scalar shifts, which all experts share, are identities unless the plan has them.
    gathered_dtype: the dtype of matrices in shards, while they are gathered; None if they are not in shards.
    """

    gathered_dtype: torch.dtype | None = None

    def __init__(
        self,
        experts: int,
        options: LayerOptions,
        plan: Plan,
    ) -> None:
        super().__init__()
        parts = [(Role.FFN_IN, options.ffn_dim)] * (2 if options.activation == "swiglu" else 1)
        self.input_shift = make_shift(plan.shifts)
        self.input = ExpertProjection(experts, options.dim, parts, plan)
        self.activation_shift = make_shift(plan.shifts)
        self.activation = ACTIVATIONS[options.activation]()
        self.dropout = nn.Dropout(options.activation_dropout) if options.activation_dropout else nn.Identity()
        self.inner_norm = (
            Unnormed() if plan.inner_norm is None else ExpertNorm(plan.inner_norm, experts, options.ffn_dim, options)
        )
        self.output_shift = make_shift(plan.shifts)
        self.output = ExpertProjection(experts, options.ffn_dim, [(Role.FFN_OUT, options.dim)], plan)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrix products."""
        return self.gathered_dtype or self.input.weight.dtype

    def forward(self, rows: Tensor, groups: Groups) -> Tensor:
        """[rows, dim] to the same shape; groups: which rows belong to which expert."""
        hidden = self.activation(self.activation_shift(self.input(self.input_shift(rows), groups)))
        return self.output(self.output_shift(self.inner_norm(self.dropout(hidden), groups)), groups)
