"""The kernels of few_rows.py."""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS, STEP = 64, 32
"""A Hopper warp group multiplies 64 rows at once; with fewer rows, only older and slower instructions are available."""

NARROW, WIDE = 32, 128
MOST_NARROW = 1024
"""With more narrow tiles than this, there are at least two wide ones per multiprocessor; wide ones split numbers less often."""

PART, FULL = 256, 320
"""With few tiles, the inputs are split into parts of at least PART until about FULL programs run, and a second kernel adds the
results of the parts in a fixed order."""


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write x W^T + b into `out` [rows, outputs]; x [rows, inputs], weight [outputs, inputs], bias [outputs]; dense."""
    (rows, inputs), outputs = x.shape, len(weight)
    tiles = triton.cdiv(rows, ROWS) * triton.cdiv(outputs, NARROW)
    columns = WIDE if tiles > MOST_NARROW else NARROW
    parts = max(1, min(triton.cdiv(inputs, PART), FULL // tiles))
    found = out if parts == 1 else out.new_empty(parts, rows, outputs)
    _multiply[(triton.cdiv(rows, ROWS), triton.cdiv(outputs, columns), parts)](
        x,
        weight,
        bias if parts == 1 else None,
        found,
        rows,
        inputs,
        outputs,
        triton.cdiv(inputs, parts * STEP) * STEP,
        ROWS=ROWS,
        COLUMNS=columns,
        STEP=STEP,
        num_warps=4,
        num_stages=3,
    )
    if parts > 1:
        size = rows * outputs
        _add_parts[(triton.cdiv(size, 512),)](found, bias, out, size, outputs, PARTS=parts, BLOCK=512, num_warps=4)


@triton.jit
def _multiply(
    x_at,
    weight_at,
    bias_at,
    out_at,
    rows,
    inputs,
    outputs,
    part,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    # Tiles of the same columns run side by side: one of them loads the weights, and the others find them in the cache.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(2) * part
    step = first + tl.arange(0, STEP)
    # Indices out of range read the last row or column, and are not stored.
    x_at += tl.minimum(row, rows - 1)[:, None] * inputs + step[None, :]
    weight_at += tl.minimum(column, outputs - 1).to(tl.int64)[None, :] * inputs + step[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for _ in range(first, tl.minimum(first + part, inputs), STEP):
        total = tl.dot(tl.load(x_at), tl.load(weight_at), total, input_precision="tf32x3")
        x_at += STEP
        weight_at += STEP
    inside = (row[:, None] < rows) & (column[None, :] < outputs)
    if bias_at is not None:
        total += tl.load(bias_at + column, mask=column < outputs, other=0.0)[None, :]
    out_at += tl.program_id(2) * rows * outputs
    tl.store(out_at + row[:, None] * outputs + column[None, :], total, mask=inside)


@triton.jit
def _add_parts(parts_at, bias_at, out_at, size, outputs, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < size
    total = tl.load(parts_at + offset, mask=inside)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts_at + part * size + offset, mask=inside)
    if bias_at is not None:
        total += tl.load(bias_at + offset % outputs, mask=inside)
    tl.store(out_at + offset, total, mask=inside)
