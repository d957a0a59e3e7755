"""Triton kernels for relu_product.py."""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kilolayer.speed.operators.random_bits import Draw
from kilolayer.speed.operators.random_bits_kernel import is_kept

WARPS = 2
BLOCK_COLUMNS = 256 * WARPS  # 16 bytes per lane along one row, so that each thread sums its own columns
STEP = 8
"""Number of rows loaded at once."""
BLOCK = 1024
"""Elements per program of the dropout kernel: 16 bytes per lane of its 4 warps."""


def drop_inplace(x: Tensor, draw: Draw) -> None:
    """Apply dropout to x, which is contiguous, in offset: times draw.scale where kept, times 0 elsewhere."""
    size = x.numel()
    _drop_inplace[(triton.cdiv(size, BLOCK),)](x, size, *draw, BLOCK=BLOCK, num_warps=4)


def pass_gradient(gradient: Tensor, hidden: Tensor, passed: Tensor, sums: Tensor, block_rows: int, scale: float) -> None:
    """Write scale * gradient where hidden > 0 to `passed`, and its sums over blocks of `block_rows` rows to `sums`.

    gradient, hidden, passed: [rows, columns]. sums: [blocks, 1, columns]. All are contiguous.
    """
    rows, columns = gradient.shape
    _pass_gradient[(triton.cdiv(columns, BLOCK_COLUMNS), sums.shape[0])](
        gradient,
        hidden,
        passed,
        sums,
        rows,
        None if scale == 1.0 else scale,
        WIDTH=columns,
        ROWS=block_rows,
        STEP=STEP,
        COLUMNS=BLOCK_COLUMNS,
        num_warps=WARPS,
    )


@triton.jit(do_not_specialize=["threshold"])
def _drop_inplace(x_at, size, seed_at, threshold, kept_scale, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_at + offset, mask=offset < size)
    x = x.to(tl.float32) * tl.where(is_kept(seed_at, offset, threshold), kept_scale, 0.0)
    tl.store(x_at + offset, x.to(x_at.dtype.element_ty), mask=offset < size)


@triton.jit(do_not_specialize=["rows"])
def _pass_gradient(
    gradient_at,
    hidden_at,
    passed_at,
    sums_at,
    rows,
    scale,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column_inside = column < WIDTH
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for start in tl.static_range(0, ROWS, STEP):
        row = block * ROWS + start + tl.arange(0, STEP)
        offset = row[:, None] * WIDTH + column[None, :]
        inside = (row < rows)[:, None] & column_inside[None, :]
        gradient = tl.load(gradient_at + offset, mask=inside, other=0.0)
        hidden = tl.load(hidden_at + offset, mask=inside, other=0.0)
        if scale is not None:
            gradient = (scale * gradient.to(tl.float32)).to(gradient.dtype)
        passed = tl.where(hidden <= 0.0, 0.0, gradient)
        tl.store(passed_at + offset, passed, mask=inside)
        total += tl.sum(passed.to(tl.float32), axis=0)
    tl.store(sums_at + block * WIDTH + column, total, mask=column_inside)
