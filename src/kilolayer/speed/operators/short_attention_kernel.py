"""Triton kernels for short_attention.py."""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kilolayer.speed.operators.random_bits import Draw
from kilolayer.speed.operators.random_bits_kernel import is_kept


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor | None,
    mixed: Tensor,
    heads: int,
    key_heads: int,
    causal: bool,
    draw: Draw,
) -> None:
    """Write drop(softmax(q k^T / sqrt(head_dim) + keys)) v to `mixed`.

    query, mixed: [batch, queries, heads * head_dim]. key, value: [batch, length, key_heads * head_dim]. keys: [batch, length].
    The last dimension is dense.
    """
    batch, queries, width = query.shape
    _attend[(batch * heads,)](
        query,
        key,
        value,
        keys,
        mixed,
        *_strides(query, key, value, keys, mixed),
        queries,
        key.shape[1],
        (width // heads) ** -0.5,
        *draw,
        HEADS=heads,
        GROUP=heads // key_heads,
        HEAD_DIM=width // heads,
        QUERIES=_tile(queries),
        KEYS=_tile(key.shape[1]),
        CAUSAL=causal,
        num_warps=_warps(queries, key.shape[1]),
    )


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor | None,
    query_found: Tensor,
    key_found: Tensor,
    value_found: Tensor,
    heads: int,
    key_heads: int,
    causal: bool,
    draw: Draw,
) -> None:
    """Write the gradients of the inputs of `attend` to the tensors `..._found`, which have the same shapes."""
    batch, queries, width = query.shape
    _attend_backward[(batch * key_heads,)](
        gradient,
        query,
        key,
        value,
        keys,
        query_found,
        key_found,
        value_found,
        *_strides(query, key, value, keys, gradient),
        *_strides(query_found, key_found, value_found, None, gradient)[:6],
        queries,
        key.shape[1],
        (width // heads) ** -0.5,
        *draw,
        HEADS=heads,
        GROUP=heads // key_heads,
        HEAD_DIM=width // heads,
        QUERIES=_tile(queries),
        KEYS=_tile(key.shape[1]),
        CAUSAL=causal,
        num_warps=_warps(queries, key.shape[1]),
        # Queries and gradients of two members at once do not fit beside wide keys and values.
        num_stages=1,
    )


def _strides(query: Tensor, key: Tensor, value: Tensor, keys: Tensor | None, mixed: Tensor) -> tuple[int, ...]:
    """The strides of the batch and position dimensions."""
    steps = [each.stride(axis) for each in (query, key, value) for axis in (0, 1)]
    return (*steps, 0 if keys is None else keys.stride(0), mixed.stride(0), mixed.stride(1))


def _tile(length: int) -> int:
    return max(16, triton.next_power_of_2(length))


def _warps(queries: int, keys: int) -> int:
    return {16: 1, 32: 2, 64: 4, 128: 8}[max(_tile(queries), _tile(keys))]


@triton.jit
def _weights(query, key, keys, queries, length, scale, rows, columns, CAUSAL: tl.constexpr):
    """softmax of one head's scores: fp32 [QUERIES, KEYS]; 0 where a query may attend to no key."""
    scores = tl.dot(query, tl.trans(key)) * scale
    if keys is not None:
        bias = tl.load(keys + columns, mask=columns < length, other=float("-inf")).to(tl.float32)
        scores += bias[None, :]
    else:
        scores = tl.where(columns[None, :] < length, scores, float("-inf"))
    if CAUSAL:
        scores = tl.where(rows[:, None] >= columns[None, :], scores, float("-inf"))
    highest = tl.max(scores, axis=1)
    powers = tl.exp(scores - tl.where(highest == float("-inf"), 0.0, highest)[:, None])
    total = tl.sum(powers, axis=1)
    return powers / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _is_kept(seed_at, threshold, head, queries, length, rows, columns):
    """Which weights of one of the batch's heads are kept: bool [QUERIES, KEYS]."""
    position = head * queries * length + (rows[:, None] * length + columns[None, :])
    return is_kept(seed_at, position, threshold)


@triton.jit(do_not_specialize=["threshold"])
def _attend(
    query_at,
    key_at,
    value_at,
    keys_at,
    mixed_at,
    query_batch,
    query_row,
    key_batch,
    key_row,
    value_batch,
    value_row,
    keys_batch,
    mixed_batch,
    mixed_row,
    queries,
    length,
    scale,
    seed_at,
    threshold,
    kept_scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    batch, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    rows, columns, depth = tl.arange(0, QUERIES), tl.arange(0, KEYS), tl.arange(0, HEAD_DIM)
    row_inside, column_inside = rows[:, None] < queries, columns[:, None] < length
    shared = head // GROUP * HEAD_DIM + depth[None, :]
    own = head * HEAD_DIM + depth[None, :]
    query = tl.load(query_at + batch * query_batch + rows[:, None] * query_row + own, mask=row_inside, other=0.0)
    key = tl.load(key_at + batch * key_batch + columns[:, None] * key_row + shared, mask=column_inside, other=0.0)
    value = tl.load(value_at + batch * value_batch + columns[:, None] * value_row + shared, mask=column_inside, other=0.0)
    if keys_at is not None:
        keys_at += batch * keys_batch
    weights = _weights(query, key, keys_at, queries, length, scale, rows, columns, CAUSAL)
    if seed_at is None:
        weights = weights.to(value.dtype)
    else:
        # Rounded first, so that they take half the registers while the random numbers are drawn.
        weights = (weights * kept_scale).to(value.dtype)
        kept = _is_kept(seed_at, threshold, batch * HEADS + head, queries, length, rows, columns)
        weights = tl.where(kept, weights, 0.0)
    mixed = tl.dot(weights, value)
    pointers = mixed_at + batch * mixed_batch + rows[:, None] * mixed_row + own
    tl.store(pointers, mixed.to(value.dtype), mask=row_inside)


@triton.jit(do_not_specialize=["threshold"])
def _attend_backward(
    gradient_at,
    query_at,
    key_at,
    value_at,
    keys_at,
    query_found_at,
    key_found_at,
    value_found_at,
    query_batch,
    query_row,
    key_batch,
    key_row,
    value_batch,
    value_row,
    keys_batch,
    gradient_batch,
    gradient_row,
    query_found_batch,
    query_found_row,
    key_found_batch,
    key_found_row,
    value_found_batch,
    value_found_row,
    queries,
    length,
    scale,
    seed_at,
    threshold,
    kept_scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    batch, key_head = (tl.program_id(0) // (HEADS // GROUP)).to(tl.int64), tl.program_id(0) % (HEADS // GROUP)
    rows, columns, depth = tl.arange(0, QUERIES), tl.arange(0, KEYS), tl.arange(0, HEAD_DIM)
    row_inside, column_inside = rows[:, None] < queries, columns[:, None] < length
    shared = key_head * HEAD_DIM + depth[None, :]
    key = tl.load(key_at + batch * key_batch + columns[:, None] * key_row + shared, mask=column_inside, other=0.0)
    value = tl.load(value_at + batch * value_batch + columns[:, None] * value_row + shared, mask=column_inside, other=0.0)
    if keys_at is not None:
        keys_at += batch * keys_batch
    key_found = tl.zeros([KEYS, HEAD_DIM], dtype=tl.float32)
    value_found = tl.zeros([KEYS, HEAD_DIM], dtype=tl.float32)
    for member in range(GROUP):
        own = (key_head * GROUP + member) * HEAD_DIM + depth[None, :]
        query = tl.load(query_at + batch * query_batch + rows[:, None] * query_row + own, mask=row_inside, other=0.0)
        gradient_pointers = gradient_at + batch * gradient_batch + rows[:, None] * gradient_row + own
        gradient = tl.load(gradient_pointers, mask=row_inside, other=0.0)
        weights = _weights(query, key, keys_at, queries, length, scale, rows, columns, CAUSAL)
        if seed_at is None:
            value_found += tl.dot(tl.trans(weights.to(value.dtype)), gradient)
            weights_found = tl.dot(gradient, tl.trans(value))
        else:
            # Dropped weights are marked by a minus sign, which takes no register.
            head = batch * HEADS + key_head * GROUP + member
            weights = tl.where(_is_kept(seed_at, threshold, head, queries, length, rows, columns), weights, -weights)
            value_found += tl.dot(tl.trans((tl.maximum(weights, 0.0) * kept_scale).to(value.dtype)), gradient)
            weights_found = tl.where(weights > 0.0, tl.dot(gradient, tl.trans(value)) * kept_scale, 0.0)
            weights = tl.abs(weights)
        scores_found = weights * (weights_found - tl.sum(weights * weights_found, axis=1)[:, None]) * scale
        scores_found = scores_found.to(value.dtype)
        pointers = query_found_at + batch * query_found_batch + rows[:, None] * query_found_row + own
        tl.store(pointers, tl.dot(scores_found, key).to(value.dtype), mask=row_inside)
        key_found += tl.dot(tl.trans(scores_found), query)
    key_pointers = key_found_at + batch * key_found_batch + columns[:, None] * key_found_row + shared
    tl.store(key_pointers, key_found.to(value.dtype), mask=column_inside)
    value_pointers = value_found_at + batch * value_found_batch + columns[:, None] * value_found_row + shared
    tl.store(value_pointers, value_found.to(value.dtype), mask=column_inside)
