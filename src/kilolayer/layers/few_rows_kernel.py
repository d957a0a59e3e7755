"""The kernel of few_rows.py."""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS, STEP = 32, 32
MOST_SMALL_TILES = 512
"""Above so many tiles the GPU is full, and wider ones load less."""


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write x W^T + b into `out` [rows, outputs]; x [rows, inputs], weight [outputs, inputs], bias [outputs]; dense."""
    (rows, inputs), outputs = x.shape, len(weight)
    wide = triton.cdiv(rows, ROWS) * outputs // 32 > MOST_SMALL_TILES
    columns = 64 if wide else 32
    _multiply[(outputs // columns, triton.cdiv(rows, ROWS))](
        x,
        weight,
        bias,
        out,
        rows,
        inputs,
        outputs,
        ROWS=ROWS,
        COLUMNS=columns,
        STEP=STEP,
        num_warps=4,
        num_stages=3,
    )


@triton.jit
def _multiply(
    x_at,
    weight_at,
    bias_at,
    out_at,
    rows,
    inputs,
    outputs,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    step = tl.arange(0, STEP)
    inside = row[:, None] < rows
    x_at += row[:, None] * inputs + step[None, :]
    weight_at += column[None, :] * inputs + step[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for _ in range(0, inputs, STEP):
        x = tl.load(x_at, mask=inside, other=0.0)
        total = tl.dot(x, tl.load(weight_at), total, input_precision="ieee")
        x_at += STEP
        weight_at += STEP
    if bias_at is not None:
        total += tl.load(bias_at + column)[None, :]
    tl.store(out_at + row[:, None] * outputs + column[None, :], total, mask=inside)
