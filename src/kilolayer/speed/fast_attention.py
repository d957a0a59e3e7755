"""Attention by fused operators: the same function and modules as in layers/attention.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kilolayer.layers.attention import Attention, CrossAttention, SelfAttention
from kilolayer.layers.cache import KeyCache
from kilolayer.layers.mask import Mask
from kilolayer.layers.projection import Projection
from kilolayer.speed.fast_context import FastContext
from kilolayer.speed.operators.largest_logit import measure_largest_logit
from kilolayer.speed.operators.short_attention import short_cross_attention, short_self_attention
from kilolayer.speed.operators.step_attention import step_cross_attention, step_self_attention
from kilolayer.speed.product import normalize, project
from kilolayer.speed.static_keys import StaticKeys


def self_attention(f: SelfAttention, x: Tensor, context: FastContext, cache: KeyCache | None, seed: Tensor | None) -> Tensor:
    """The input of the output projection: [batch, length, dim] to the same shape. seed: of the dropout on attention weights."""
    return join_heads(f, attend(f, query_key_value(f, x), context, cache, seed))


def query_key_value(f: SelfAttention, x: Tensor) -> Tensor:
    """Queries, keys and values side by side: [batch, length, dim] to [batch, length, sum of rows]."""
    return _normalize_heads(f, project(f.query_key_value, f.input_shift(x)), (f.query_norm, f.key_norm))


def attend(f: SelfAttention, packed: Tensor, context: FastContext, cache: KeyCache | None, seed: Tensor | None) -> Tensor:
    """Self-attention of what `query_key_value` computed: to [batch, heads, length, head_dim]."""
    query, key, value = (_split(f, part) for part in packed.split(f.rows, dim=-1))
    if context.rotation is not None:
        query, key = context.rotation.rotate_query(query), context.rotation.rotate_key(key)
    if context.mask.largest_logit is not None:
        measure_largest_logit(query, key, context.mask)
    if context.short:
        mixed = short_self_attention(packed, context.key_bias, f.heads, f.key_heads, context.causal, seed, _dropout(f))
        return _split(f, mixed)
    if context.step:
        assert isinstance(cache, StaticKeys)
        assert isinstance(context.past, Tensor)
        assert context.mask.values is not None
        return _split(f, step_self_attention(query, key, value, cache.keys, cache.values, context.mask.values, context.past))
    if cache is not None:
        key, value = cache.append(key, value, context.past)
    return _mix(f, query, key, value, context.mask)


def cross_attention(f: CrossAttention, x: Tensor, context: FastContext, cache: KeyCache | None, seed: Tensor | None) -> Tensor:
    """The input of the output projection: [batch, target, dim] to the same shape. seed: of the dropout on attention weights."""
    query = _normalize_heads(f, project(f.query, f.input_shift(x)), (f.query_norm,))
    if context.short:
        assert context.source is not None
        packed = _normalize_heads(f, project(f.key_value, context.source.read()), (f.key_norm,))
        if context.memory_mask is not None and context.memory_mask.largest_logit is not None:
            key, _ = _split_parts(f, packed, f.key_value)
            measure_largest_logit(_split(f, query), key, context.memory_mask)
        mixed = short_cross_attention(query, packed, context.source_key_bias, f.heads, f.key_heads, seed, _dropout(f))
        return join_heads(f, _split(f, mixed))
    key, value = source_keys(f, context, cache)
    assert context.memory_mask is not None
    if context.memory_mask.largest_logit is not None:
        measure_largest_logit(_split(f, query), key, context.memory_mask)
    if context.step:
        assert context.memory_mask.values is not None
        return join_heads(f, _split(f, step_cross_attention(_split(f, query), key, value, context.memory_mask.values)))
    return join_heads(f, _mix(f, _split(f, query), key, value, context.memory_mask))


def source_keys(f: CrossAttention, context: FastContext, cache: KeyCache | None) -> tuple[Tensor, Tensor]:
    """Keys and values of the source, [batch, key_heads, source, head_dim] each; cached at the first step."""
    if cache is not None and cache.memory is not None:
        return cache.memory
    assert context.source is not None
    packed = _normalize_heads(f, project(f.key_value, context.source.read()), (f.key_norm,))
    key, value = _split_parts(f, packed, f.key_value)
    if cache is not None:
        cache.memory = (key, value)
    return key, value


def _split_parts(f: Attention, packed_BLD: Tensor, projection: Projection) -> list[Tensor]:
    """The parts of what `projection` computed, each as [batch, heads, length, head_dim]."""
    return [_split(f, part) for part in packed_BLD.split(projection.rows, dim=-1)]


def _normalize_heads(f: Attention, packed_BLD: Tensor, norms: tuple[nn.Module, ...]) -> Tensor:
    """Normalize the heads of queries and keys where the projection wrote them; norms: of the first parts of `packed_BLD`."""
    if all(isinstance(norm, nn.Identity) for norm in norms):
        return packed_BLD
    widths = [f.heads * f.head_dim if norm is f.query_norm else f.key_width for norm in norms]
    *parts, rest = packed_BLD.split([*widths, packed_BLD.shape[-1] - sum(widths)], dim=-1)
    normed = [
        normalize(norm, part.unflatten(-1, (-1, f.head_dim))).flatten(-2) for norm, part in zip(norms, parts, strict=True)
    ]
    return torch.cat([*normed, rest], dim=-1)


def _mix(f: Attention, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
    grouped = f.key_heads != f.heads
    if grouped and not _supports_grouped_keys(query, mask):
        key, value = (part.repeat_interleave(f.heads // f.key_heads, dim=1) for part in (key, value))
        grouped = False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask.values, is_causal=mask.causal, dropout_p=_dropout(f), enable_gqa=grouped
    )


def _supports_grouped_keys(query: Tensor, mask: Mask) -> bool:
    """Whether a fused kernel supports grouped key heads here; on CUDA, SDPA would otherwise compute the whole score matrix."""
    return query.device.type == "cpu" or (mask.values is None and query.dtype in (torch.float16, torch.bfloat16))


def _dropout(f: Attention) -> float:
    return f.dropout if f.training else 0.0


def _split(f: Attention, x_BLD: Tensor) -> Tensor:
    """[batch, length, heads * head_dim] to [batch, heads, length, head_dim]."""
    return x_BLD.unflatten(-1, (-1, f.head_dim)).transpose(1, 2)


def join_heads(f: Attention, heads_BHLD: Tensor) -> Tensor:
    """LN(concat(g_h head_h)), with the norm and the head scales g_h if the plan has them."""
    return normalize(f.inner_norm, f.head_scale(heads_BHLD).transpose(1, 2).flatten(2))
