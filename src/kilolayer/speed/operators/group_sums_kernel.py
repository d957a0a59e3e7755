"""Sums over the rows of each group in two launches, with a run time that does not depend on the sizes of the groups.

The rows are divided into parts of equal size, one per program. The rows of a part that belong to one group are a segment. A
program sums its segments and writes each sum to line part + group of a buffer. From one segment to the next the part or the
group increases and neither decreases, so no two segments share a line. A second kernel adds the lines of each group in a fixed
order.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kilolayer.speed.operators.partial_sums_kernel import write_total

PARTS = 264
"""Number of parts: two per multiprocessor, for any number of rows."""
ROWS = 8
COLUMNS = 512
"""The layout of the rows that a program sums: its threads are arranged along a row, each with its own columns."""
LINES = 16
LINE_COLUMNS = 128
"""Lines and columns that are added at once: few groups have more lines than that, and many groups need many programs."""
WARPS = 4


def empty_sums(totals: Sequence[Tensor]) -> Tensor:
    """The buffer for the sums of segments: fp32 [parts + groups, vectors, width] for totals [groups, width] of each vector."""
    groups, width = totals[0].shape
    return totals[0].new_empty(PARTS + groups, len(totals), width, dtype=torch.float32)


def sum_segments(rows: Tensor, ends: Tensor, of_row: Tensor, sums: Tensor) -> None:
    """Write the sum of each segment of the rows [rows, width]."""
    width = rows.shape[1]
    _sum_segments[(PARTS, triton.cdiv(width, COLUMNS))](
        rows, ends, of_row, sums, len(ends), WIDTH=width, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS
    )


def add_up_segments(sums: Tensor, ends: Tensor, totals: Sequence[Tensor]) -> None:
    """Write the total of each vector, at most 3, over the segments of each group, in its own dtype; 0 for an empty group."""
    _, vectors, width = sums.shape
    first, second, third = [*totals, *[None] * (3 - vectors)]
    _add_up_segments[(triton.cdiv(width, LINE_COLUMNS), len(ends), vectors)](
        sums,
        ends,
        first,
        second,
        third,
        len(ends),
        PARTS=PARTS,
        VECTORS=vectors,
        WIDTH=width,
        LINES=LINES,
        COLUMNS=LINE_COLUMNS,
        num_warps=WARPS,
    )


@triton.jit
def part_rows(part, parts, ends_at, groups):
    """The first row of a part, the row after its last, and the row after the last group."""
    total = tl.load(ends_at + groups - 1)
    size = tl.cdiv(total, parts)
    start = tl.minimum(part * size, total)
    return start, tl.minimum(start + size, total), total


@triton.jit
def segment_at(row, stop, ends_at, of_row_at):
    """The group of the segment that begins at `row`, and the row after its last, in a part that ends at `stop`."""
    group = tl.load(of_row_at + row)
    return group, tl.minimum(tl.load(ends_at + group), stop)


@triton.jit(do_not_specialize=["groups"])
def _sum_segments(
    rows_at,
    ends_at,
    of_row_at,
    sums_at,
    groups,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    part = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_inside = column < WIDTH
    begin, stop, _ = part_rows(part, tl.num_programs(0), ends_at, groups)
    while begin < stop:
        group, end = segment_at(begin, stop, ends_at, of_row_at)
        total = tl.zeros([COLUMNS], dtype=tl.float32)
        for start in range(begin, end, ROWS):
            row = start + tl.arange(0, ROWS)
            inside = (row < end)[:, None] & column_inside[None, :]
            offset = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
            total += tl.sum(tl.load(rows_at + offset, mask=inside, other=0.0).to(tl.float32), axis=0)
        tl.store(sums_at + (part + group) * WIDTH + column, total, mask=column_inside)
        begin = end


@triton.jit(do_not_specialize=["groups"])
def _add_up_segments(
    sums_at,
    ends_at,
    first_at,
    second_at,
    third_at,
    groups,
    PARTS: tl.constexpr,
    VECTORS: tl.constexpr,
    WIDTH: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    group, vector = tl.program_id(1), tl.program_id(2)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    begin = tl.load(ends_at + group - 1, mask=group > 0, other=0)
    end = tl.load(ends_at + group)
    size = tl.maximum(tl.cdiv(tl.load(ends_at + groups - 1), PARTS), 1)
    first = begin // size
    stop = tl.where(begin < end, (end - 1) // size + 1, first)
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for start in range(first, stop, LINES):
        part = start + tl.arange(0, LINES)
        offset = ((part + group).to(tl.int64) * VECTORS + vector)[:, None] * WIDTH + column[None, :]
        total += tl.sum(tl.load(sums_at + offset, mask=(part < stop)[:, None] & inside[None, :], other=0.0), axis=0)
    offset = group.to(tl.int64) * WIDTH + column
    write_total(vector, first_at, second_at, third_at, None, offset, total, inside)
