"""The kernel of relu_product.py."""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK_COLUMNS = 256  # a warp reads 16 bytes a lane along one row


def pass_gradient(gradient: Tensor, hidden: Tensor, passed: Tensor, sums: Tensor, block_rows: int) -> None:
    """Write the gradient where hidden is above 0 into `passed`, and its sums over `block_rows` rows each into `sums`.

    gradient, hidden and passed [rows, columns], sums [blocks, columns]; all contiguous.
    """
    rows, columns = gradient.shape
    _pass_gradient[(triton.cdiv(columns, BLOCK_COLUMNS), sums.shape[0])](
        gradient,
        hidden,
        passed,
        sums,
        rows,
        WIDTH=columns,
        ROWS=block_rows,
        COLUMNS=BLOCK_COLUMNS,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["rows"])
def _pass_gradient(
    gradient_at, hidden_at, passed_at, sums_at, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    block = tl.program_id(1).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    place = row[:, None] * WIDTH + column[None, :]
    column_inside = column < WIDTH
    inside = (row < rows)[:, None] & column_inside[None, :]
    gradient = tl.load(gradient_at + place, mask=inside, other=0.0)
    hidden = tl.load(hidden_at + place, mask=inside, other=0.0)
    passed = tl.where(hidden <= 0.0, 0.0, gradient)
    tl.store(passed_at + place, passed, mask=inside)
    tl.store(sums_at + block * WIDTH + column, tl.sum(passed.to(tl.float32), axis=0), mask=column_inside)
