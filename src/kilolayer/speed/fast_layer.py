"""A layer by fused operators: the equation of layers/sublayer.py on the same modules, divided so that kernels can be fused.

    y = N_out( skip * x + branch * N_post( f( in_scale * N_pre(x) ) ) )

Scales, dropout, addition and norm are one kernel in the forward and one in the backward pass. If the next sublayer begins with
a norm (Pre-LN), that kernel writes both the sum and its norm; for this, each layer is given the first norm of the next one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from kilolayer.layers.attention import Attention, CrossAttention, SelfAttention
from kilolayer.layers.block import Block
from kilolayer.layers.cache import KeyCache
from kilolayer.layers.feedforward import FeedForward
from kilolayer.layers.norms.base import Norm
from kilolayer.layers.routing import Routing
from kilolayer.layers.scale import LayerConstant, factor_of
from kilolayer.layers.stream import Pair
from kilolayer.layers.sublayer import DropPath, Sublayer, add_scaled
from kilolayer.moe.layer import Answered, Routed, SparseFeedForward
from kilolayer.speed.fast_attention import cross_attention, self_attention
from kilolayer.speed.fast_context import FastContext
from kilolayer.speed.fast_feedforward import feedforward, run_experts
from kilolayer.speed.operators.fused_norm import can_fuse_residual_norm, residual_norm
from kilolayer.speed.product import dropout_of, is_kernel_norm, normalize, project
from kilolayer.speed.shared_experts import ask_processes
from kilolayer.speed.state import State

DRAWS = 2
"""Number of seeds per sublayer: one for the dropout inside f, and one for the dropout on the branch."""


def run_layer(
    block: Block, x: State, context: FastContext, cache: KeyCache | None, following: nn.Module | None, seeds: Tensor | None
) -> tuple[State, Routing | None]:
    """Run `block` on the state x; return the new state, and the routing of a layer with experts.

    following: the first norm of the next layer, applied by the kernel that writes the state. seeds: int64 [sublayers, DRAWS],
    from which dropout is drawn; None without dropout.
    """
    x = run_attention(block, x, context, cache, seeds)
    return run_sublayer(block.feedforward, x, context, cache, following, None if seeds is None else seeds[-1])


def run_attention(block: Block, x: State, context: FastContext, cache: KeyCache | None, seeds: Tensor | None) -> State:
    """The first part of `run_layer`: all sublayers below the feed-forward network."""
    sublayers = block.sublayers()
    for index, sublayer in enumerate(sublayers[:-1]):
        own = None if seeds is None else seeds[index]
        x, _ = run_sublayer(sublayer, x, context, cache, opening_norm(sublayers[index + 1]), own)
    return x


def first_state(block: Block, x: Tensor, dtype: torch.dtype, following: nn.Module | None) -> State:
    """The input of a stack's first layer, in the form in which layers pass states on, so that one compiled layer serves all."""
    first, *_, last = block.sublayers()
    if not _is_fused(last, x, dtype, _norm_of_sum(last, following)):
        return State.of(x)
    opening = opening_norm(first) if isinstance(last.out_norm, nn.Identity) else None
    return State(x, x.to(dtype)) if opening is None else State.of(x, opening(x).to(dtype))


def opening_norm(sublayer: Sublayer) -> nn.Module | None:
    """N_pre of a sublayer, if the sublayer before it may apply it, which requires that f reads nothing but the norm's output.

    Not before a router, which needs unrounded input, because small differences decide which experts are chosen.
    """
    reads_norm = isinstance(sublayer.in_scale, nn.Identity)
    return sublayer.pre_norm if sublayer.plan.pre_norm and reads_norm and type(sublayer) is Sublayer else None


def run_sublayer(
    sublayer: Sublayer,
    x: State,
    context: FastContext,
    cache: KeyCache | None,
    following: nn.Module | None,
    seeds: Tensor | None,
    *,
    heads: Tensor | None = None,
    samples: Tensor | None = None,
) -> tuple[State, Routing | None]:
    """Run one residual sublayer. following: `opening_norm` of the next one; seeds: int64 [DRAWS].

    heads: the input of attention's output projection, if it has been computed. samples: `drop_path_factors`, if drawn before.
    """
    f = sublayer.f
    if isinstance(f, SparseFeedForward):
        routed, seed = route(sublayer, x, context), None if seeds is None else seeds[0]
        if f.group is None:
            answered = f.ask(routed, lambda rows, groups: run_experts(f.experts, rows, groups, seed))
        else:
            answered = ask_processes(f, routed, seed)
        return finish_experts(sublayer, x, routed, answered, following, seeds)
    assert isinstance(f, SelfAttention | CrossAttention | FeedForward)
    fused = _is_fused(sublayer, x.precise, f.output.weight.dtype, _norm_of_sum(sublayer, following))
    biased = not fused or not isinstance(sublayer.post_norm, nn.Identity)
    if heads is None:
        y = _run_function(f, read_state(sublayer, x), context, cache, None if seeds is None else seeds[0], biased=biased)
    else:
        y = project(f.output, heads, biased=biased)
    return _finish(sublayer, x, y, None if biased else f.output.bias, following, seeds, samples, fused=fused), None


def route(sublayer: Sublayer, x: State, context: FastContext) -> Routed:
    """The first part of a sublayer with experts: its input, sorted by expert."""
    assert isinstance(sublayer.f, SparseFeedForward)
    return sublayer.f.route(sublayer.in_scale(sublayer.pre_norm(x.precise)), context.real)


def finish_experts(
    sublayer: Sublayer, x: State, routed: Routed, answered: Answered, following: nn.Module | None, seeds: Tensor | None
) -> tuple[State, Routing]:
    """The last part of a sublayer with experts: what they have computed, joined with the residual x."""
    f = sublayer.f
    assert isinstance(f, SparseFeedForward)
    y, routing = f.combine(routed, answered)
    fused = _is_fused(sublayer, x.precise, f.experts.dtype, _norm_of_sum(sublayer, following))
    return _finish(sublayer, x, y.view(x.precise.shape), None, following, seeds, None, fused=fused), routing


def _finish(
    sublayer: Sublayer,
    x: State,
    y: Tensor,
    shift: Tensor | None,
    following: nn.Module | None,
    seeds: Tensor | None,
    samples: Tensor | None,
    *,
    fused: bool,
) -> State:
    """The output of f, normalized and added to the residual. shift: as in `_join`; samples: as in `run_sublayer`."""
    y = normalize(sublayer.post_norm, y)
    if not fused:
        y = sublayer.dropout(y)
        y = sublayer.drop_path(y) if samples is None else y * samples[:, None, None].to(y.dtype)
        return _add(sublayer, x, sublayer.branch(y))
    samples = drop_path_factors(sublayer, x.precise.shape[0]) if samples is None else samples
    norm, seed = _norm_of_sum(sublayer, following), None if seeds is None else seeds[1]
    state = _join(sublayer, x.precise, y, shift, norm, seed, samples, keeps_sum=norm is following)
    return State(state.precise, state.rounded, state.normed, x.second)


def _add(sublayer: Sublayer, x: State, branch: Tensor) -> State:
    """N_out(skip * x + branch), one operation at a time."""
    total = sublayer.skip(x.precise) + branch
    if x.second is None:
        return State.of(normalize(sublayer.out_norm, total))
    total = add_scaled(total, sublayer.plan.second_in, x.second)
    second = add_scaled(x.second, sublayer.plan.second_out, branch)
    return State.of(Pair(normalize(sublayer.out_norm, total), second))


def drop_path_factors(sublayer: Sublayer, batch: int) -> Tensor | None:
    """The factor of drop path for the branch of each sample, drawn now: fp32 [batch]; None if no branch is dropped."""
    path = sublayer.drop_path
    return path.factors(batch) if isinstance(path, DropPath) and path.training else None


def read_state(sublayer: Sublayer, x: State) -> Tensor:
    """The input of f: in_scale * N_pre(x)."""
    if x.normed is not None:
        return x.normed
    prepared = sublayer.plan.pre_norm or not isinstance(sublayer.in_scale, nn.Identity)
    return sublayer.in_scale(sublayer.pre_norm(x.precise if prepared else x.rounded))


def _run_function(
    f: SelfAttention | CrossAttention | FeedForward,
    x: Tensor,
    context: FastContext,
    cache: KeyCache | None,
    seed: Tensor | None,
    *,
    biased: bool,
) -> Tensor:
    if isinstance(f, SelfAttention):
        return project(f.output, self_attention(f, x, context, cache, seed), biased=biased)
    if isinstance(f, CrossAttention):
        return project(f.output, cross_attention(f, x, context, cache, seed), biased=biased)
    return feedforward(f, x, seed, biased=biased)


def _join(
    sublayer: Sublayer,
    x: Tensor,
    y: Tensor,
    shift: Tensor | None,
    norm: nn.Module | None,
    seed: Tensor | None,
    samples: Tensor | None,
    *,
    keeps_sum: bool,
) -> State:
    """N(skip * x + branch * drop(y + shift)) in one kernel; with `keeps_sum`, both the sum and its norm.

    y: the output of N_post; shift: the bias of f's last product, if it has not been added to y yet.
    """
    assert is_kernel_norm(norm)
    skip, branch = factor_of(sublayer.skip), factor_of(sublayer.branch)
    assert not isinstance(branch, Tensor)
    number, vector = (1.0, skip) if isinstance(skip, Tensor) else (skip, None)
    dropout = dropout_of(sublayer.dropout)
    precise, rounded, _ = residual_norm(
        x, y, shift, vector, number, branch, norm.weight, norm.bias, norm.eps, keeps_sum, seed, dropout, samples
    )
    return State.of(precise, rounded) if keeps_sum else State(precise, rounded)


def _norm_of_sum(sublayer: Sublayer, following: nn.Module | None) -> nn.Module | None:
    """The norm of the sum of skip and branch: N_out of this sublayer, or N_pre of the next one."""
    return following if isinstance(sublayer.out_norm, nn.Identity) else sublayer.out_norm


def _is_fused(sublayer: Sublayer, x: Tensor, dtype: torch.dtype, norm: nn.Module | None) -> bool:
    """Whether one kernel adds what f computes in `dtype` to x and normalizes it."""
    return (
        is_kernel_norm(norm)
        and can_fuse_residual_norm(x.device, norm.weight.dtype, dtype, norm.weight.shape[0])
        and norm.weight.dtype == x.dtype
        and _unsupported_option(sublayer) is None
    )


def _unsupported_option(sublayer: Sublayer) -> str | None:
    """The option of the sublayer that the kernel does not support, in words; None if it supports all."""
    if sublayer.plan.second_in or sublayer.plan.second_out:
        return "they carry a second state"
    skip, branch = factor_of(sublayer.skip), factor_of(sublayer.branch)
    if isinstance(branch, Tensor):
        return f"the scale of their branch {_scale_kind(sublayer.branch, 'is learned')}"
    if isinstance(skip, Tensor) and skip.dim() == 0:
        return f"the scale of their residual {_scale_kind(sublayer.skip, 'is one learned number')}"
    return None


def _scale_kind(scale: nn.Module, learned: str) -> str:
    return "differs from layer to layer" if isinstance(scale, LayerConstant) else learned


def why_unfused(block: Block) -> str | None:
    """The option of a layer that prevents the fused residual kernel; None if there is none."""
    for sublayer in block.sublayers():
        if (reason := _unsupported_option(sublayer)) is not None:
            return reason
        if isinstance(sublayer.out_norm, nn.Identity) and not sublayer.plan.pre_norm:
            return "no norm stands on their residual"
        norm = sublayer.pre_norm if isinstance(sublayer.out_norm, nn.Identity) else sublayer.out_norm
        if isinstance(norm, Norm) and not is_kernel_norm(norm):
            return f"their norms are {norm.words()}"
        if isinstance(sublayer.out_norm, nn.Identity) and not isinstance(sublayer.in_scale, nn.Identity):
            return "what their functions read is scaled after its norm"
    return None


def needs_dropout_seeds(modules: Iterable[nn.Module]) -> bool:
    """Whether one of these modules of a layer currently drops elements."""
    return any(
        module.training and module.dropout if isinstance(module, Attention) else dropout_of(module) for module in modules
    )
