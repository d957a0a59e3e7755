"""Tokens to the experts that they chose, and back. Shapes depend on the number of tokens alone, never on their choices."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kilolayer.moe.groups import Groups


class Dispatch(NamedTuple):
    """Choices as rows that lie sorted by expert; within an expert first choices before second ones, each in tokens' order.

    Row r is the choice order[r], and choice c is the row place[c]; the j-th choice of token t is c = j * tokens + t. Choices
    that are sent nowhere lie behind the last group.
    """

    groups: Groups
    order: Tensor
    place: Tensor

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> Dispatch:
        """chosen: int64 [tokens, k]; `experts`, the number of them, where a token is sent nowhere."""
        sorted_experts, order = chosen.mT.flatten().sort(stable=True)
        numbers = torch.arange(experts, device=chosen.device)
        ends = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)
        place = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        return cls(Groups(ends, sorted_experts.clamp(max=experts - 1)), order, place.view(chosen.shape[1], -1))

    @property
    def load(self) -> Tensor:
        """The choices that fell on each expert: int64 [experts]."""
        ends = self.groups.ends.long()
        return ends.diff(prepend=ends.new_zeros(1))

    def gather(self, tokens: Tensor) -> Tensor:
        """[tokens, dim] to rows [tokens * k, dim]."""
        return _Taken.apply(tokens, self.order % tokens.shape[0], self.place)

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each token's rows: [tokens * k, dim] and [tokens, k] to [tokens, dim], in the rows' dtype."""
        choices = self.unsort(rows).unflatten(0, self.place.shape)
        return (choices * weights.mT[..., None]).sum(dim=0).to(rows.dtype)

    def unsort(self, rows: Tensor) -> Tensor:
        """Rows in the order of choices: [tokens * k, dim] to the same."""
        return _Taken.apply(rows, self.place.flatten(), self.order[None])

    def queue(self) -> Tensor:
        """How many choices of the same expert come before each: int64 [tokens, k]."""
        ends, of_row = self.groups
        starts = ends.long() - self.load
        return (torch.arange(len(of_row), device=of_row.device) - starts[of_row])[self.place].mT


def capacity_of(experts: int, top_k: int, factor: float, tokens: Tensor) -> Tensor:
    """The most choices that an expert takes: k * ceil(tokens / experts) * factor, rounded down, at least 1.

    tokens: int64 [], how many there are, padding left out.
    """
    share = -(-tokens // experts)
    # A hair more: 0.29 * 100 is 28.999999999999996.
    return (share.double() * (top_k * factor) + 1e-6).floor().clamp(min=1)


class _Taken(torch.autograd.Function):
    """x[index]. Backwards each row of x gathers from where it went, so that nothing is added up in a chance order.

    readers [copies, rows of x]: the places in the output that hold each row.
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
