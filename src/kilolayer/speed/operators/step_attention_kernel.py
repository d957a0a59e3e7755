"""The Triton kernel for step_attention.py."""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    mixed: Tensor,
    own: tuple[Tensor, Tensor] | None = None,
    past: Tensor | None = None,
) -> None:
    """Write softmax(q k^T / sqrt(head_dim)) v, over the entries that each hypothesis attends to, to `mixed`.

    query: [rows, heads, width, head_dim]. keys, values: [rows, key heads, entries, head_dim], contiguous. seen: bool
    [rows, 1, width or 1, entries]. mixed: [rows, width, heads * head_dim], contiguous. own: the new keys and values,
    [rows, key heads, width, head_dim], which are written after the first `past` entries; later entries are not read.
    """
    rows, heads, width, head_dim = query.shape
    key_heads, entries = keys.shape[1:3]
    new_key, new_value = (query, query) if own is None else own
    # Tensor cores need at least 16 queries; fp32 does not use them.
    queries = max(8 if query.dtype == torch.float32 else 16, triton.next_power_of_2(heads // key_heads * width))
    _look[(rows * key_heads,)](
        query,
        keys,
        values,
        new_key,
        new_value,
        seen.view(torch.uint8),
        seen if past is None else past,
        mixed,
        *(each.stride(axis) for each in (query, new_key, new_value) for axis in (0, 1, 2)),
        seen.stride(0),
        seen.stride(2) if seen.shape[2] > 1 else 0,
        entries,
        head_dim**-0.5,
        KEY_HEADS=key_heads,
        GROUP=heads // key_heads,
        WIDTH=width,
        HEAD_DIM=head_dim,
        QUERIES=queries,
        ENTRIES=min(64 if head_dim <= 64 else 32, max(16, triton.next_power_of_2(entries))),
        NEW=own is not None,
        num_warps=4 if queries <= 16 else 8,
        num_stages=2,
    )


@triton.jit
def _look(
    query_at,
    keys_at,
    values_at,
    new_key_at,
    new_value_at,
    seen_at,
    past_at,
    mixed_at,
    query_row,
    query_head,
    query_step,
    key_row,
    key_head,
    key_step,
    value_row,
    value_head,
    value_step,
    seen_row,
    seen_step,
    entries,
    scale,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    ENTRIES: tl.constexpr,
    NEW: tl.constexpr,
):
    """One program computes all hypotheses of a sentence for one key head; a row of its tiles is one hypothesis of one head."""
    row, shared = (tl.program_id(0) // KEY_HEADS).to(tl.int64), tl.program_id(0) % KEY_HEADS
    lines, columns, depth = tl.arange(0, QUERIES), tl.arange(0, ENTRIES), tl.arange(0, HEAD_DIM)
    head, hypothesis, used = shared * GROUP + lines // WIDTH, lines % WIDTH, lines < GROUP * WIDTH
    pointers = query_at + row * query_row + head[:, None] * query_head + hypothesis[:, None] * query_step + depth[None, :]
    query = tl.load(pointers, mask=used[:, None], other=0.0)
    keys_at += (row * KEY_HEADS + shared) * entries * HEAD_DIM
    values_at += (row * KEY_HEADS + shared) * entries * HEAD_DIM
    seen_at += row * seen_row
    if NEW:
        # Of the entries of this step, a hypothesis attends only to its own, with which the softmax begins.
        past = tl.load(past_at).to(tl.int32)
        pointers = new_key_at + row * key_row + shared * key_head + hypothesis[:, None] * key_step + depth[None, :]
        new_key = tl.load(pointers, mask=used[:, None], other=0.0)
        pointers = new_value_at + row * value_row + shared * value_head + hypothesis[:, None] * value_step + depth[None, :]
        new_value = tl.load(pointers, mask=used[:, None], other=0.0)
        written = (past + lines[:, None]) * HEAD_DIM + depth[None, :]
        tl.store(keys_at + written, new_key, mask=lines[:, None] < WIDTH)
        tl.store(values_at + written, new_value, mask=lines[:, None] < WIDTH)
        highest = tl.sum(query.to(tl.float32) * new_key.to(tl.float32), axis=1) * scale
        total = tl.full([QUERIES], 1.0, tl.float32)
        mixed = new_value.to(tl.float32)
    else:
        past = entries
        highest = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        mixed = tl.zeros([QUERIES, HEAD_DIM], tl.float32)
    for start in range(0, past, ENTRIES):
        entry = start + columns
        inside = entry < past
        kept = entry[:, None] * HEAD_DIM + depth[None, :]
        key = tl.load(keys_at + kept, mask=inside[:, None], other=0.0)
        value = tl.load(values_at + kept, mask=inside[:, None], other=0.0)
        looked = seen_at + hypothesis[:, None] * seen_step + entry[None, :]
        allowed = tl.load(looked, mask=used[:, None] & inside[None, :], other=0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(allowed != 0, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, powers = tl.exp(highest - base), tl.exp(scores - base[:, None])
        total = total * shrink + tl.sum(powers, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(powers.to(value.dtype), value, input_precision="ieee")
        highest = higher
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    offset = ((row * WIDTH + hypothesis[:, None]) * (KEY_HEADS * GROUP) + head[:, None]) * HEAD_DIM + depth[None, :]
    tl.store(mixed_at + offset, mixed.to(query.dtype), mask=used[:, None])
