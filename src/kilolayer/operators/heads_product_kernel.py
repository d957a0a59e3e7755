"""The kernel of heads_product.py."""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import triton
import triton.language as tl
from torch import Tensor

WARPS = 2
BLOCK_COLUMNS = 256 * WARPS  # 16 bytes a lane along one row, so that each thread sums columns of its own
STEP = 8
"""Rows that are loaded at once."""


def join(parts: Sequence[Tensor], joined: Tensor, sums: Tensor, block_rows: int) -> None:
    """Write the parts side by side into `joined`, and the sums over `block_rows` rows of a sequence each into `sums`.

    parts [batch, heads, length, head width], each head contiguous; joined [batch * length, width of all heads] and
    sums [batch * blocks of a sequence, 1, width of all heads], contiguous.
    """
    _, _, length, head_dim = parts[0].shape
    widths = [part.shape[1] * head_dim for part in parts]
    column_blocks = triton.cdiv(max(widths), BLOCK_COLUMNS)
    _join[(len(parts) * column_blocks, sums.shape[0])](
        tuple(parts),
        tuple(part.stride()[:3] for part in parts),
        joined,
        sums,
        length,
        STARTS=tuple(accumulate(widths, initial=0)),
        HEAD_DIM=head_dim,
        COLUMN_BLOCKS=column_blocks,
        ROWS=block_rows,
        STEP=STEP,
        COLUMNS=BLOCK_COLUMNS,
        num_warps=WARPS,
    )


@triton.jit(do_not_specialize=["length"])
def _join(
    parts_at,
    strides,
    joined_at,
    sums_at,
    length,
    STARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    PARTS: tl.constexpr = len(STARTS) - 1
    WIDTH: tl.constexpr = STARTS[PARTS]
    part = tl.program_id(0) // COLUMN_BLOCKS
    column = tl.program_id(0) % COLUMN_BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    for index in tl.static_range(PARTS):
        if part == index:
            _join_part(
                parts_at[index],
                strides[index],
                joined_at + STARTS[index],
                sums_at + STARTS[index],
                length,
                column,
                column < STARTS[index + 1] - STARTS[index],
                WIDTH,
                HEAD_DIM,
                ROWS,
                STEP,
                COLUMNS,
            )


@triton.jit
def _join_part(
    part_at,
    strides,
    joined_at,
    sums_at,
    length,
    column,
    column_inside,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block = tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(length, ROWS)
    sequence, first = block // blocks, block % blocks * ROWS
    part_at += sequence * strides[0] + (column // HEAD_DIM).to(tl.int64) * strides[1] + column % HEAD_DIM
    joined_at += sequence * length * WIDTH + column
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for start in range(first, tl.minimum(first + ROWS, length), STEP):
        row = start + tl.arange(0, STEP)
        inside = (row < length)[:, None] & column_inside[None, :]
        gradient = tl.load(part_at[None, :] + row[:, None] * strides[2], mask=inside, other=0.0)
        tl.store(joined_at[None, :] + row[:, None] * WIDTH, gradient, mask=inside)
        total += tl.sum(gradient.to(tl.float32), axis=0)
    tl.store(sums_at + block * WIDTH + column, total, mask=column_inside)
