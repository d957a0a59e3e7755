"""The Triton kernel for relu_network.py: a matrix product that is masked, and summed over rows, before it is written."""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

BLOCK_ROWS, BLOCK_COLUMNS, STEP = 128, 128, 64
"""The tile sizes: rows and columns of the product, and the step along its inner dimension."""
GROUP = 8
"""Number of vertically adjacent tiles that run together, so that they read the weights from the cache."""


def multiply_and_mask(gradient: Tensor, weight: Tensor, hidden: Tensor, passed: Tensor, sums: Tensor, scale: float) -> None:
    """Write scale * gradient W where hidden > 0 to `passed`, and its sums over blocks of BLOCK_ROWS rows to `sums`.

    gradient: [rows, dim]. weight: [dim, width]. hidden, passed: [rows, width]. All four have dense rows, aligned to 16 bytes.
    sums: [blocks, 1, width].
    """
    (rows, dim), width = gradient.shape, weight.shape[1]
    tile = [BLOCK_ROWS, BLOCK_COLUMNS]
    _multiply_and_mask[(triton.cdiv(rows, BLOCK_ROWS) * triton.cdiv(width, BLOCK_COLUMNS),)](
        TensorDescriptor.from_tensor(gradient, [BLOCK_ROWS, STEP]),
        TensorDescriptor.from_tensor(weight, [STEP, BLOCK_COLUMNS]),
        TensorDescriptor.from_tensor(hidden, tile),
        TensorDescriptor.from_tensor(passed, tile),
        sums,
        rows,
        width,
        dim,
        scale,
        ROWS=BLOCK_ROWS,
        COLUMNS=BLOCK_COLUMNS,
        STEP=STEP,
        GROUP=GROUP,
        num_warps=4,
        num_stages=3,
    )


@triton.jit(do_not_specialize=["rows"])
def _multiply_and_mask(
    gradient,
    weight,
    hidden,
    passed,
    sums_at,
    rows,
    width,
    dim,
    scale,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
):
    tiles_down, tiles_across = tl.cdiv(rows, ROWS), tl.cdiv(width, COLUMNS)
    group, within = tl.program_id(0) // (GROUP * tiles_across), tl.program_id(0) % (GROUP * tiles_across)
    height = tl.minimum(tiles_down - group * GROUP, GROUP)
    down, across = group * GROUP + within % height, within // height
    row, column = down * ROWS, across * COLUMNS
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for step in range(0, dim, STEP):
        total = tl.dot(gradient.load([row, step]), weight.load([step, column]), total)
    # Outside the tensors, zeros are read and nothing is written.
    kept = hidden.load([row, column])
    total = tl.where(kept <= 0.0, 0.0, scale * total)
    passed.store([row, column], total.to(kept.dtype))
    columns = column + tl.arange(0, COLUMNS)
    tl.store(sums_at + down.to(tl.int64) * width + columns, tl.sum(total, axis=0), mask=columns < width)
