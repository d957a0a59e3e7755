"""Attention of one decoding step on a GPU: a few hypotheses of a sentence look at the entries that the sentence has kept.

There are far more entries than queries, and the time goes into reading them. So one program serves all hypotheses that share a
row and a key head, reads no entry that is not written yet, takes the view as the bool that it is, and writes the new keys and
values on its way. On the CPU the same functions are SDPA, which is what the kernel is tested against.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.layers import kernels
from kilolayer.layers.cache import StaticKeys
from kilolayer.layers.mask import Mask

HEAD_DIMS = (16, 32, 64, 128)
MOST_QUERIES = 64
"""Hypotheses times heads of a group: the lines that one program holds."""


def serves(device: torch.device, dtype: torch.dtype, queries: int, head_dim: int) -> bool:
    """Whether so many queries of a key head can be attended to here."""
    known = dtype in (torch.bfloat16, torch.float16, torch.float32) and head_dim in HEAD_DIMS
    return known and queries <= MOST_QUERIES and kernels.run_on(device)


def step_self_attention(query: Tensor, key: Tensor, value: Tensor, cache: StaticKeys, mask: Mask, past: Tensor) -> Tensor:
    """Keep the new keys and values; mixed heads [rows, width, heads * head width] of what each hypothesis sees.

    query [rows, heads, width, head width]; key, value [rows, key heads, width, head width]; past int64 [width]: the entries
    that they are kept in, one after the other. Under the mask a hypothesis sees entries before them, and of them its own.
    """
    assert mask.values is not None
    if query.device.type == "cpu":
        keys, values = cache.append(key, value, past)
        return _reference(query, keys, values, mask.values)
    from kilolayer.layers.step_attention_kernel import look

    mixed = _room_for(query)
    look(query, cache.keys, cache.values, mask.values, mixed, (key, value), past)
    return mixed


def step_cross_attention(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
    """Mixed heads [rows, width, heads * head width]; key, value [rows, key heads, source, head width], contiguous."""
    assert mask.values is not None
    if query.device.type == "cpu":
        return _reference(query, key, value, mask.values)
    from kilolayer.layers.step_attention_kernel import look

    mixed = _room_for(query)
    look(query, key, value, mask.values, mixed)
    return mixed


def _room_for(query: Tensor) -> Tensor:
    rows, heads, width, head_dim = query.shape
    return query.new_empty(rows, width, heads * head_dim)


def _reference(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    heads = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen, enable_gqa=True)
    return heads.transpose(1, 2).flatten(2)
