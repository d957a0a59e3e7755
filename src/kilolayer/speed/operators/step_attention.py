"""Fused attention of one decoding step on a GPU: the hypotheses of a sentence attend to the entries of its key-value cache.

There are far more entries than queries, so most of the time goes into reading the cache. One program therefore computes all
hypotheses that share a row and a key head, skips entries that are not written yet, reads the mask as bool, and writes the new
keys and values to the cache. On the CPU the same functions call SDPA, which the kernel is tested against.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.speed.operators import kernels

HEAD_DIMS = (16, 32, 64, 128)
MOST_QUERIES = 64
"""Maximum number of queries of one program: hypotheses times query heads per key head."""


def can_run_step_attention(device: torch.device, dtype: torch.dtype, queries: int, head_dim: int) -> bool:
    """Whether the kernel supports this many queries per key head on this device."""
    known = dtype in (torch.bfloat16, torch.float16, torch.float32) and head_dim in HEAD_DIMS
    return known and queries <= MOST_QUERIES and kernels.runs_on(device, "step_attention")


def step_self_attention(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, seen: Tensor, past: Tensor
) -> Tensor:
    """Write the new keys and values to the cache and compute self-attention: [rows, width, heads * head_dim].

    width: the number of hypotheses. query: [rows, heads, width, head_dim]. key, value: the new ones, [rows, key heads, width,
    head_dim]. keys, values: the cache, [rows, key heads, entries, head_dim]. past: int64 [width], the consecutive entries that
    the new ones are written to. seen: bool [rows, 1, width, entries], the entries that a hypothesis attends to: some of those
    before `past`, and of the new ones its own.
    """
    if query.device.type == "cpu":
        keys.index_copy_(2, past, key)
        values.index_copy_(2, past, value)
        return _reference(query, keys, values, seen)
    from kilolayer.speed.operators.step_attention_kernel import attend

    mixed = _empty_mixed(query)
    attend(query, keys, values, seen, mixed, (key, value), past)
    return mixed


def step_cross_attention(query: Tensor, keys: Tensor, values: Tensor, real: Tensor) -> Tensor:
    """Compute cross-attention: [rows, width, heads * head_dim].

    query: [rows, heads, width, head_dim]. keys, values: [rows, key heads, source length, head_dim], contiguous. real: bool
    [rows, 1, 1, source length], False at padding.
    """
    if query.device.type == "cpu":
        return _reference(query, keys, values, real)
    from kilolayer.speed.operators.step_attention_kernel import attend

    mixed = _empty_mixed(query)
    attend(query, keys, values, real, mixed)
    return mixed


def _empty_mixed(query: Tensor) -> Tensor:
    rows, heads, width, head_dim = query.shape
    return query.new_empty(rows, width, heads * head_dim)


def _reference(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    heads = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen, enable_gqa=True)
    return heads.transpose(1, 2).flatten(2)
