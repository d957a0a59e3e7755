"""Attention of one decoding step on a GPU: a few hypotheses of a sentence look at the entries that the sentence has kept.

There are far more entries than queries, and the time goes into reading them. So one program serves all hypotheses that share a
row and a key head, reads no entry that is not written yet, takes the view as the bool that it is, and writes the new keys and
values on its way. On the CPU the same functions are SDPA, which is what the kernel is tested against.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.operators import kernels

HEAD_DIMS = (16, 32, 64, 128)
MOST_QUERIES = 64
"""Hypotheses times heads of a group: the lines that one program holds."""


def can_run_step_attention(device: torch.device, dtype: torch.dtype, queries: int, head_dim: int) -> bool:
    """Whether so many queries of a key head can be attended to here."""
    known = dtype in (torch.bfloat16, torch.float16, torch.float32) and head_dim in HEAD_DIMS
    return known and queries <= MOST_QUERIES and kernels.runs_on(device, "step_attention")


def step_self_attention(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, seen: Tensor, past: Tensor
) -> Tensor:
    """Write the new key and value among those that are kept; mixed heads [rows, width, heads * head width].

    query [rows, heads, width, head width]; key, value [rows, key heads, width, head width]; keys, values [rows, key heads,
    entries, head width], what is kept; past int64 [width]: the entries that the new ones take, one after the other; seen bool
    [rows, 1, width, entries]: a hypothesis sees entries before them, and of them its own.
    """
    if query.device.type == "cpu":
        keys.index_copy_(2, past, key)
        values.index_copy_(2, past, value)
        return _reference(query, keys, values, seen)
    from kilolayer.operators.step_attention_kernel import attend

    mixed = _empty_mixed(query)
    attend(query, keys, values, seen, mixed, (key, value), past)
    return mixed


def step_cross_attention(query: Tensor, keys: Tensor, values: Tensor, real: Tensor) -> Tensor:
    """Mixed heads [rows, width, heads * head width].

    query as above; keys, values [rows, key heads, source, head width], contiguous; real bool [rows, 1, 1, source].
    """
    if query.device.type == "cpu":
        return _reference(query, keys, values, real)
    from kilolayer.operators.step_attention_kernel import attend

    mixed = _empty_mixed(query)
    attend(query, keys, values, real, mixed)
    return mixed


def _empty_mixed(query: Tensor) -> Tensor:
    rows, heads, width, head_dim = query.shape
    return query.new_empty(rows, width, heads * head_dim)


def _reference(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    heads = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen, enable_gqa=True)
    return heads.transpose(1, 2).flatten(2)
