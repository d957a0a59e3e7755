"""The sparse feed-forward function, a mixture of experts, and functions to find and freeze the experts of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kilolayer.errors import InputError
from kilolayer.layers.block import Sparsity
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.routing import Routing
from kilolayer.moe.balance import statistics, token_sums
from kilolayer.moe.config import MoE
from kilolayer.moe.dispatch import Dispatch, capacity_of
from kilolayer.moe.exchange import Exchange, JointDispatch, count_choices, run_in_order
from kilolayer.moe.experts import ExpertNorm, ExpertProjection, Experts
from kilolayer.moe.groups import Groups
from kilolayer.moe.router import Choice, make_router
from kilolayer.parallel.collectives import gather, sum_over
from kilolayer.parallel.peers import Peers
from kilolayer.recipes.base import Plan


class Routed(NamedTuple):
    """The tokens of a batch by their experts: all that is known before anything is sent to other processes.

    real: bool [tokens], False at padding; None if there is none. rows: [tokens * k, dim], the tokens sorted by expert, as `own`
    says. counts: int64 [k, experts], the number of j-th choices of each expert; None if no other process has experts.
    sums: `token_sums` of these tokens.
    """

    real: Tensor | None
    choice: Choice
    own: Dispatch
    rows: Tensor
    counts: Tensor | None
    sums: Tensor


class Answered(NamedTuple):
    """What came back from the experts: the rows of `Routed`, and `sums` over the processes whose tokens count as one batch.

    counts: int64 [processes, k, experts], the `counts` of the processes that share the experts; None if none do.
    """

    rows: Tensor
    counts: Tensor | None
    sums: Tensor


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
        self.group: Peers | None = None
        self.joint: Peers | None = None
        self.router = make_router(moe, options.dim, plan)
        self.experts = Experts(moe.experts, options, plan)

    def forward(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Routing]:
        """real: bool [batch, length], False at padding, which is not sent to any expert and whose output is 0."""
        routed = self.route(x, real)
        y, routing = self.combine(routed, self.ask(routed, self.experts))
        return y.view(x.shape), routing

    def route(self, x: Tensor, real: Tensor | None) -> Routed:
        """Choose the experts of the tokens x [batch, length, dim], and sort them; real as in `forward`."""
        tokens = x.flatten(0, 1)
        if real is not None:
            real = real.flatten()
            tokens = torch.where(real[:, None], tokens, 0)
        choice = self.router(tokens, real)
        own = Dispatch.of(choice.experts, self.moe.experts)
        rows = own.gather(tokens.to(self.experts.dtype))
        counts = None if self.group is None else count_choices(choice.experts, self.moe.experts)
        return Routed(real, choice, own, rows, counts, token_sums(choice, real))

    def ask(self, routed: Routed, experts: Callable[[Tensor, Groups], Tensor]) -> Answered:
        """Have the rows computed by `experts`, [rows, dim] to the same shape, wherever these are."""
        if self.group is None:
            return Answered(experts(routed.rows, routed.own.groups), None, routed.sums)
        here = self.moe.experts // self.group.size
        return self.ask_others(routed, lambda rows, held: run_in_order(rows, held, here, experts))

    def ask_others(self, routed: Routed, run_arrived: Callable[[Tensor, Tensor], Tensor]) -> Answered:
        """Have the rows computed by the processes that share the experts; run_arrived: as in `Exchange.run`."""
        assert self.group is not None
        assert routed.counts is not None
        counts = gather(routed.counts, self.group)
        rows = Exchange.of(counts, self.group).run(routed.rows, run_arrived)
        return Answered(rows, counts, sum_over(routed.sums, self.joint))

    def combine(self, routed: Routed, answered: Answered) -> tuple[Tensor, Routing]:
        """Add up the rows of each token: [tokens, dim]; and the routing."""
        counted = self._counted(routed, answered)
        weights, dropped = self._within_capacity(counted, routed.choice.weights, routed.real)
        y = routed.own.combine(answered.rows, weights)
        measured = statistics(routed.choice, routed.real, answered.sums)
        loss = self.moe.balance_weight * measured.balance + self.moe.z_loss * measured.z
        temperature = self.router.temperature.detach()
        return y, Routing(loss, counted.load, measured.tokens, measured.first, measured.entropy, dropped, temperature)

    def _counted(self, routed: Routed, answered: Answered) -> Dispatch | JointDispatch:
        """The choices that losses, capacity and statistics count as one batch."""
        if self.joint is None or answered.counts is None:
            return routed.own
        return JointDispatch(routed.own, routed.choice.experts, answered.counts, self.joint.rank)

    def _within_capacity(
        self, counted: Dispatch | JointDispatch, weights: Tensor, real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The weights [tokens, k], set to 0 for choices over an expert's capacity, and the share of such choices, []."""
        if self.moe.capacity is None or not self.training:
            return weights, weights.new_zeros(())
        if isinstance(counted, JointDispatch):
            tokens = counted.tokens
        else:
            tokens = (weights.new_ones(len(weights), dtype=torch.bool) if real is None else real).sum()
        limit = capacity_of(self.moe.experts, self.moe.top_k, self.moe.capacity, tokens)
        over = (counted.load - limit).clamp(min=0).sum()
        dropped = over / counted.load.sum().clamp(min=1)
        return torch.where(counted.queue() < limit, weights, 0), dropped.to(weights.dtype)


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
