"""Fused attention over short sequences on a GPU: one program computes a whole head, forward and backward.

For short sequences most of the time goes into kernel launches and copies, not into matrix products. These operators therefore
read queries, keys and values where the projection wrote them, take padding as a bias on the keys, and recompute the attention
weights in the backward pass. On the CPU they run `reference`, which the kernels are tested against.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kilolayer.speed.operators import kernels, random_bits
from kilolayer.speed.operators.random_bits import draw_of

LONGEST = 128
HEAD_DIMS = (16, 32, 64, 128)


def can_run_short_attention(device: torch.device, dtype: torch.dtype, longest: int, head_dim: int) -> bool:
    """Whether the kernels support sequences of up to `longest` tokens on this device."""
    # The length is checked last: in an exported or compiled model it is symbolic, and a comparison would specialize on it.
    served = dtype in (torch.bfloat16, torch.float16) and kernels.runs_on(device, "short_attention")
    return served and head_dim in HEAD_DIMS and longest <= LONGEST


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor | None,
    heads: int,
    causal: bool,
    seed: Tensor | None,
    dropout: float,
) -> Tensor:
    """Compute drop(softmax(q k^T / sqrt(head_dim) + keys)) v; the output is 0 for a query that may attend to no key.

    query: [batch, queries, heads * head_dim]. key, value: [batch, length, key heads * head_dim]. keys: a bias on each key,
    [batch, length]. seed: int64 [1], for the dropout of random_bits.py on the weights [batch, heads, queries, length]; None: no
    dropout. Returns [batch, queries, heads * head_dim].
    """
    head_dim = query.shape[-1] // heads
    query, key, value = (part.unflatten(-1, (-1, head_dim)).transpose(1, 2) for part in (query, key, value))
    key, value = (part.repeat_interleave(heads // key.shape[1], dim=1) for part in (key, value))
    scores = query @ key.mT * head_dim**-0.5
    if keys is not None:
        scores = scores + keys[:, None, None, :]
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores[0, 0], dtype=torch.bool).tril(), float("-inf"))
    nowhere = (scores == float("-inf")).all(dim=-1, keepdim=True)
    weights = scores.masked_fill(nowhere, 0.0).softmax(dim=-1).masked_fill(nowhere, 0.0)
    return (random_bits.dropout(weights, seed, dropout) @ value).transpose(1, 2).flatten(2)


@torch.library.custom_op("kilolayer::short_self_attention", mutates_args=(), device_types="cuda")
def short_self_attention(
    packed: Tensor,
    keys: Tensor | None,
    heads: int,
    key_heads: int,
    causal: bool,
    seed: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute self-attention from packed queries, keys and values: [batch, length, heads * head_dim].

    packed: [batch, length, (heads + 2 key_heads) * head_dim]. keys: a bias on each key, [batch, length]. seed: int64 [1], for
    dropout of the attention weights with probability `dropout`; None: no dropout.
    """
    from kilolayer.speed.operators.short_attention_kernel import attend

    head_dim = packed.shape[-1] // (heads + 2 * key_heads)
    query, key, value = packed.split([heads * head_dim, key_heads * head_dim, key_heads * head_dim], dim=-1)
    mixed = torch.empty_like(query, memory_format=torch.contiguous_format)
    attend(query, key, value, keys, mixed, heads, key_heads, causal, draw_of(seed, dropout))
    return mixed


@torch.library.custom_op("kilolayer::short_self_attention_backward", mutates_args=(), device_types="cuda")
def short_self_attention_backward(
    gradient: Tensor,
    packed: Tensor,
    keys: Tensor | None,
    heads: int,
    key_heads: int,
    causal: bool,
    seed: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return the gradient of `packed`. gradient: that of the output, [batch, length, heads * head_dim]."""
    from kilolayer.speed.operators.short_attention_kernel import attend_backward

    head_dim = packed.shape[-1] // (heads + 2 * key_heads)
    sizes = [heads * head_dim, key_heads * head_dim, key_heads * head_dim]
    found = torch.empty_like(packed)
    (query, key, value), (of_query, of_key, of_value) = (each.split(sizes, dim=-1) for each in (packed, found))
    found_in, draw = (of_query, of_key, of_value), draw_of(seed, dropout)
    attend_backward(gradient, query, key, value, keys, *found_in, heads, key_heads, causal, draw)
    return found


@torch.library.custom_op("kilolayer::short_cross_attention", mutates_args=(), device_types="cuda")
def short_cross_attention(
    query: Tensor,
    packed: Tensor,
    keys: Tensor | None,
    heads: int,
    key_heads: int,
    seed: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute cross-attention, in the shape of `query`.

    query: [batch, queries, heads * head_dim]. packed: keys and values, [batch, keys, 2 key_heads * head_dim]. The other
    arguments are those of `short_self_attention`.
    """
    from kilolayer.speed.operators.short_attention_kernel import attend

    mixed = torch.empty_like(query, memory_format=torch.contiguous_format)
    key, value = packed.chunk(2, dim=-1)
    attend(query, key, value, keys, mixed, heads, key_heads, False, draw_of(seed, dropout))
    return mixed


@torch.library.custom_op("kilolayer::short_cross_attention_backward", mutates_args=(), device_types="cuda")
def short_cross_attention_backward(
    gradient: Tensor,
    query: Tensor,
    packed: Tensor,
    keys: Tensor | None,
    heads: int,
    key_heads: int,
    seed: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `query` and `packed`. gradient: that of the output, [batch, queries, heads * head_dim]."""
    from kilolayer.speed.operators.short_attention_kernel import attend_backward

    of_query, found = torch.empty_like(query), torch.empty_like(packed)
    (key, value), (of_key, of_value) = (each.chunk(2, dim=-1) for each in (packed, found))
    found_in, draw = (of_query, of_key, of_value), draw_of(seed, dropout)
    attend_backward(gradient, query, key, value, keys, *found_in, heads, key_heads, False, draw)
    return of_query, found


@short_self_attention.register_kernel("cpu")
def _(
    packed: Tensor,
    keys: Tensor | None,
    heads: int,
    key_heads: int,
    causal: bool,
    seed: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    head_dim = packed.shape[-1] // (heads + 2 * key_heads)
    query, key, value = packed.split([heads * head_dim, key_heads * head_dim, key_heads * head_dim], dim=-1)
    return reference(query, key, value, keys, heads, causal, seed, dropout).contiguous()


@short_self_attention_backward.register_kernel("cpu")
def _(
    gradient: Tensor,
    packed: Tensor,
    keys: Tensor | None,
    heads: int,
    key_heads: int,
    causal: bool,
    seed: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    head_dim = packed.shape[-1] // (heads + 2 * key_heads)
    query, key, value = packed.split([heads * head_dim, key_heads * head_dim, key_heads * head_dim], dim=-1)
    backward = torch.func.vjp(lambda q, k, v: reference(q, k, v, keys, heads, causal, seed, dropout), query, key, value)[1]
    return torch.cat(backward(gradient), dim=-1)


@short_cross_attention.register_kernel("cpu")
def _(
    query: Tensor,
    packed: Tensor,
    keys: Tensor | None,
    heads: int,
    key_heads: int,
    seed: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    key, value = packed.chunk(2, dim=-1)
    return reference(query, key, value, keys, heads, False, seed, dropout).contiguous()


@short_cross_attention_backward.register_kernel("cpu")
def _(
    gradient: Tensor,
    query: Tensor,
    packed: Tensor,
    keys: Tensor | None,
    heads: int,
    key_heads: int,
    seed: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    key, value = packed.chunk(2, dim=-1)
    backward = torch.func.vjp(lambda q, k, v: reference(q, k, v, keys, heads, False, seed, dropout), query, key, value)[1]
    of_query, of_key, of_value = backward(gradient)
    return of_query, torch.cat([of_key, of_value], dim=-1)


@short_self_attention.register_fake
def _(packed: Tensor, keys: Tensor | None, heads: int, key_heads: int, *_: Any) -> Tensor:
    width = packed.shape[-1] // (heads + 2 * key_heads) * heads
    return packed.new_empty(packed.shape[0], packed.shape[1], width)


@short_self_attention_backward.register_fake
def _(gradient: Tensor, packed: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(packed)


@short_cross_attention.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@short_cross_attention_backward.register_fake
def _(gradient: Tensor, query: Tensor, packed: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(packed)


def _setup_self_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    packed, keys, *ctx.numbers, seed, ctx.dropout = inputs
    ctx.save_for_backward(packed, keys, seed)


def _self_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    packed, keys, seed = ctx.saved_tensors
    found = short_self_attention_backward(gradient.contiguous(), packed, keys, *ctx.numbers, seed, ctx.dropout)
    return found, *[None] * 6


def _setup_cross_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, packed, keys, *ctx.numbers, seed, ctx.dropout = inputs
    ctx.save_for_backward(query, packed, keys, seed)


def _cross_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    query, packed, keys, seed = ctx.saved_tensors
    found = short_cross_attention_backward(gradient.contiguous(), query, packed, keys, *ctx.numbers, seed, ctx.dropout)
    return *found, *[None] * 5


short_self_attention.register_autograd(_self_backward, setup_context=_setup_self_context)
short_cross_attention.register_autograd(_cross_backward, setup_context=_setup_cross_context)
