"""Dispatch of tokens to their experts, and the combination of the experts' outputs.

Shapes depend only on the number of tokens, never on their choices, so no size is read back from the device here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kilolayer.moe.groups import Groups


class Dispatch(NamedTuple):
    """The choices of all tokens as rows sorted by expert; within an expert, first choices precede second ones, in token order.

    The j-th choice of token t has the number c = j * tokens + t. order: int64 [tokens * k], the choice in each row;
    inverse: int64 [k, tokens], the row of each choice. Choices that are not sent to any expert come after the last group.
    """

    groups: Groups
    order: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> Dispatch:
        """chosen: int64 [tokens, k], the expert of each choice; the number of experts means that it is not sent anywhere."""
        sorted_experts, order = chosen.mT.flatten().sort(stable=True)
        numbers = torch.arange(experts, device=chosen.device)
        ends = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)
        inverse = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        return cls(Groups(ends, sorted_experts.clamp(max=experts - 1)), order, inverse.view(chosen.shape[1], -1))

    @property
    def load(self) -> Tensor:
        """The number of choices of each expert: int64 [experts]."""
        ends = self.groups.ends.long()
        return ends.diff(prepend=ends.new_zeros(1))

    def gather(self, tokens: Tensor) -> Tensor:
        """Copy each token to the rows of its choices: [tokens, dim] to [tokens * k, dim]."""
        return _Gather.apply(tokens, self.order % tokens.shape[0], self.inverse)

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each token's rows: [tokens * k, dim] and [tokens, k] to [tokens, dim], in the rows' dtype."""
        choices = self.unsort(rows).unflatten(0, self.inverse.shape)
        return (choices * weights.mT[..., None]).sum(dim=0).to(rows.dtype)

    def unsort(self, rows: Tensor) -> Tensor:
        """Put rows back into the order of choices: [tokens * k, dim] to the same shape."""
        return _Gather.apply(rows, self.inverse.flatten(), self.order[None])

    def queue(self) -> Tensor:
        """The number of choices of the same expert that precede each choice: int64 [tokens, k]."""
        ends, of_row = self.groups
        starts = ends.long() - self.load
        return (torch.arange(len(of_row), device=of_row.device) - starts[of_row])[self.inverse].mT


def capacity_of(experts: int, top_k: int, factor: float, tokens: Tensor) -> Tensor:
    """The capacity of an expert: max(1, floor(k * ceil(tokens / experts) * factor)) choices.

    tokens: int64 [], the number of tokens without padding.
    """
    share = -(-tokens // experts)
    # 1e-6 compensates for rounding: 0.29 * 100 is 28.999999999999996.
    return (share.double() * (top_k * factor) + 1e-6).floor().clamp(min=1)


class _Gather(torch.autograd.Function):
    """x[index] with a deterministic backward, which gathers the gradients of each row instead of scattering them.

    readers [copies, rows of x]: the output rows that hold each row of x.
    """

    @staticmethod
    def forward(x: Tensor, index: Tensor, readers: Tensor) -> Tensor:
        return x[index]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (gradient,), (readers,) = grad_outputs, ctx.saved_tensors
        return gradient[readers].sum(dim=0), None, None
