"""The sparse feed-forward function, a mixture of experts, and functions to find and freeze the experts of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from kilolayer.errors import InputError
from kilolayer.layers.block import Sparsity
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.routing import Routing
from kilolayer.moe.balance import statistics
from kilolayer.moe.config import MoE
from kilolayer.moe.dispatch import Dispatch, capacity_of
from kilolayer.moe.exchange import SharedDispatch, make_dispatch
from kilolayer.moe.experts import ExpertNorm, ExpertProjection, Experts
from kilolayer.moe.groups import Groups
from kilolayer.moe.router import make_router
from kilolayer.parallel.collectives import sum_over
from kilolayer.parallel.group import ExpertGroup
from kilolayer.recipes.base import Plan


class SparseFeedForward(nn.Module):
    """sum_e g_e(x) FFN_e(x) over the k experts e that x is sent to: [batch, length, dim] to the same shape, and the routing.

    group: the processes that share the experts, each with its own x; None if all experts are here (shard.py).
    joint: the processes whose tokens count as one batch for losses, capacity and statistics; None if each counts its own.
    """

    def __init__(
        self,
        moe: MoE,
        options: LayerOptions,
        plan: Plan,
    ) -> None:
        super().__init__()
        self.moe = moe
        self.group: ExpertGroup | None = None
        self.joint: ExpertGroup | None = None
        self.router = make_router(moe, options.dim, plan)
        self.experts = Experts(moe.experts, options, plan)

    def forward(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Routing]:
        """real: bool [batch, length], False at padding, which is not sent to any expert and whose output is 0."""
        return self.dispatch(x, real, self.experts)

    def dispatch(self, x: Tensor, real: Tensor | None, experts: Callable[[Tensor, Groups], Tensor]) -> tuple[Tensor, Routing]:
        """As `forward`, but with `experts` to compute the rows of all experts, [rows, dim] to the same shape."""
        tokens = x.flatten(0, 1)
        if real is not None:
            real = real.flatten()
            tokens = torch.where(real[:, None], tokens, 0)
        choice = self.router(tokens, real)
        dispatch = make_dispatch(choice.experts, self.moe.experts, self.group)
        counted = dispatch.own if isinstance(dispatch, SharedDispatch) and self.joint is None else dispatch
        weights, dropped = self._within_capacity(counted, choice.weights, real)
        rows = experts(dispatch.gather(tokens.to(self.experts.dtype)), dispatch.groups)
        y = dispatch.combine(rows, weights).view(x.shape)
        measured = statistics(choice, real, self.joint)
        loss = self.moe.balance_weight * measured.balance + self.moe.z_loss * measured.z
        temperature = self.router.temperature.detach()
        return y, Routing(loss, counted.load, measured.tokens, measured.first, measured.entropy, dropped, temperature)

    def _within_capacity(
        self, dispatch: Dispatch | SharedDispatch, weights: Tensor, real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The weights [tokens, k], set to 0 for choices over an expert's capacity, and the share of such choices, []."""
        if self.moe.capacity is None or not self.training:
            return weights, weights.new_zeros(())
        counted = weights.new_ones(weights.shape[0], dtype=torch.bool) if real is None else real
        tokens = sum_over(counted.sum(), self.joint)
        limit = capacity_of(self.moe.experts, self.moe.top_k, self.moe.capacity, tokens)
        over = (dispatch.load - limit).clamp(min=0).sum()
        dropped = over / dispatch.load.sum().clamp(min=1)
        return torch.where(dispatch.queue() < limit, weights, 0), dropped.to(weights.dtype)


def make_sparsity(moe: MoE | None) -> Sparsity | None:
    """Which layers of a stack have experts, and how they are made; None in a dense model."""
    return None if moe is None else Sparsity(moe.every, partial(SparseFeedForward, moe))


def sparse_layers(model: nn.Module) -> dict[str, SparseFeedForward]:
    """The layers with experts by name, in the same order as `routing` in the model's output."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseFeedForward)}


def expert_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of the experts by name, without the routers; their first axis is the expert."""
    for name, module in model.named_modules():
        if isinstance(module, ExpertProjection | ExpertNorm):
            yield from module.named_parameters(prefix=name)


def idle_parameters(model: nn.Module, moe: MoE | None) -> int:
    """The number of expert parameters that a token does not use, counted over all processes."""
    if moe is None:
        return 0
    return sum(parameter.numel() // len(parameter) for _, parameter in expert_parameters(model)) * (moe.experts - moe.top_k)


def freeze_experts(model: nn.Module) -> None:
    """Exclude routers and experts from the training that follows, as in fine-tuning.

    The balance loss still has an effect: its gradient flows into the layers below, which produce the tokens that are routed.
    """
    for layer in need_sparse_layers(model).values():
        layer.requires_grad_(False)


def need_sparse_layers(model: nn.Module) -> dict[str, SparseFeedForward]:
    """As `sparse_layers`, but raise if the model has none."""
    layers = sparse_layers(model)
    if not layers:
        raise InputError("this model has no experts", fix="build it with moe=kilolayer.MoE(...)")
    return layers
