"""Reduces the partial sums that the programs of a backward kernel have written, in one launch for all of its vectors.

Each program reduces a few columns: it reads all their parts at once, in a fixed order, so that the result is deterministic.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 16
"""Columns per program: few, so that the parts of a narrow vector are read by many multiprocessors."""
WARPS = 8
MOST_PARTS = 512
"""Maximum number of parts read at once; more parts are read in several iterations."""


def add_up(sums: Tensor, totals: Sequence[Tensor]) -> None:
    """Sum each vector over its parts and write the result to its tensor in `totals`, in that tensor's dtype.

    sums: fp32 [parts, vectors, width], contiguous. totals: one tensor [width] per vector, at most 4.
    """
    parts, vectors, width = sums.shape
    first, second, third, fourth = [*totals, *[None] * (4 - vectors)]
    _add_up[(triton.cdiv(width, COLUMNS), vectors)](
        sums,
        first,
        second,
        third,
        fourth,
        parts,
        VECTORS=vectors,
        WIDTH=width,
        PARTS=min(triton.next_power_of_2(max(parts, 1)), MOST_PARTS),
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )


@triton.jit(do_not_specialize=["parts"])
def _add_up(
    sums_at,
    first_at,
    second_at,
    third_at,
    fourth_at,
    parts,
    VECTORS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    vector = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        offset = (part.to(tl.int64) * VECTORS + vector)[:, None] * WIDTH + column[None, :]
        total += tl.sum(tl.load(sums_at + offset, mask=(part < parts)[:, None] & inside[None, :], other=0.0), axis=0)
    write_total(vector, first_at, second_at, third_at, fourth_at, column, total, inside)


@triton.jit
def write_total(vector, first_at, second_at, third_at, fourth_at, offset, total, inside):
    """Write to the tensor of one of up to four vectors; absent ones are None."""
    _write_if(vector == 0, first_at, offset, total, inside)
    if second_at is not None:
        _write_if(vector == 1, second_at, offset, total, inside)
    if third_at is not None:
        _write_if(vector == 2, third_at, offset, total, inside)
    if fourth_at is not None:
        _write_if(vector == 3, fourth_at, offset, total, inside)


@triton.jit
def _write_if(chosen, total_at, offset, total, inside):
    if chosen:
        tl.store(total_at + offset, total.to(total_at.dtype.element_ty), mask=inside)
