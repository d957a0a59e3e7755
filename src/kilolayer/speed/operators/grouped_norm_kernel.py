"""Triton kernels for grouped_norm.py: each program processes a part of the rows and reads every row once.

For each group it loads the vectors of the bias and the norm, and holds them and the sums of their gradients in registers.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kilolayer.speed.operators.fused_norm_kernel import of_normalized, row_columns, standard_rows, standardize, tile, tile_rows
from kilolayer.speed.operators.group_sums_kernel import PARTS, part_rows, segment_at
from kilolayer.speed.operators.random_bits import Draw
from kilolayer.speed.operators.random_bits_kernel import is_kept

FORWARD = {"per_warp": 512, "fewest": 8, "most": 16, "per_thread": 16}
BACKWARD = {"per_warp": 256, "fewest": 4, "most": 16, "per_thread": 16}
"""Wide rows use more warps than in fused_norm_kernel.py, because a program holds two more vectors."""
STAGES = 3
"""Pipeline stages of the loop: the rows of the next STAGES - 1 iterations are loaded during the computation."""


def normalize(
    product: Tensor,
    ends: Tensor,
    of_row: Tensor,
    shift: Tensor | None,
    gain: Tensor,
    bias: Tensor | None,
    eps: float,
    normed: Tensor,
    statistics: Tensor,
    draw: Draw,
) -> None:
    """Write N(drop(relu(product + shift))) to `normed` and the norm's statistics to `statistics`; 0 after the last group."""
    rows, width = product.shape
    _normalize[(PARTS,)](
        product,
        ends,
        of_row,
        shift,
        gain,
        bias,
        eps,
        normed,
        statistics,
        rows,
        len(ends),
        *draw,
        WIDTH=width,
        STAGES=STAGES,
        **tile(width, **FORWARD),
    )


def normalize_backward(
    gradient: Tensor,
    product: Tensor,
    ends: Tensor,
    of_row: Tensor,
    shift: Tensor | None,
    gain: Tensor,
    statistics: Tensor,
    of_product: Tensor,
    sums: Tensor,
    draw: Draw,
) -> None:
    """Write the gradient of the product, and the partial sums per segment for the gradients of gain, bias and shift."""
    rows, width = product.shape
    _normalize_backward[(PARTS,)](
        gradient,
        product,
        ends,
        of_row,
        shift,
        gain,
        statistics,
        of_product,
        sums,
        rows,
        len(ends),
        *draw,
        CENTRED=statistics.shape[0] == 2,
        KINDS=sums.shape[1],
        WIDTH=width,
        STAGES=STAGES,
        **tile(width, **BACKWARD),
    )


@triton.jit(do_not_specialize=["rows", "groups", "threshold"])
def _normalize(
    product_at,
    ends_at,
    of_row_at,
    shift_at,
    gain_at,
    bias_at,
    eps,
    normed_at,
    statistics_at,
    rows,
    groups,
    seed_at,
    threshold,
    kept_scale,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    CENTRED: tl.constexpr = bias_at is not None
    program, programs = tl.program_id(0), tl.num_programs(0)
    column, column_inside = row_columns(WIDTH, COLUMNS)
    begin, stop, total = part_rows(program, programs, ends_at, groups)
    while begin < stop:
        group, end = segment_at(begin, stop, ends_at, of_row_at)
        entry = group * WIDTH + column
        gain = tl.load(gain_at + entry, mask=column_inside, other=0.0)[None, :]
        shift, bias = 0.0, 0.0
        if shift_at is not None:
            shift = tl.load(shift_at + entry, mask=column_inside, other=0.0).to(tl.float32)[None, :]
        if CENTRED:
            bias = tl.load(bias_at + entry, mask=column_inside, other=0.0)[None, :]
        for start in tl.range(begin, end, ROWS, num_stages=STAGES):
            row, row_inside, offset, inside = tile_rows(start, end, column, column_inside, WIDTH, ROWS)
            hidden = _rectified(tl.load(product_at + offset, mask=inside, other=0.0), shift)
            if seed_at is not None:
                hidden *= tl.where(is_kept(seed_at, offset, threshold), kept_scale, 0.0)
            standard = standardize(hidden, eps, statistics_at, row, row_inside, rows, column_inside, CENTRED, WIDTH)
            tl.store(normed_at + offset, (standard * gain + bias).to(normed_at.dtype.element_ty), mask=inside)
        begin = end
    for start in range(total + program * ROWS, rows, programs * ROWS):
        row, row_inside, offset, inside = tile_rows(start, rows, column, column_inside, WIDTH, ROWS)
        tl.store(normed_at + offset, tl.zeros([ROWS, COLUMNS], dtype=normed_at.dtype.element_ty), mask=inside)
        tl.store(statistics_at + row, tl.zeros([ROWS], dtype=tl.float32), mask=row_inside)
        if CENTRED:
            tl.store(statistics_at + rows + row, tl.zeros([ROWS], dtype=tl.float32), mask=row_inside)


@triton.jit(do_not_specialize=["rows", "groups", "threshold"])
def _normalize_backward(
    gradient_at,
    product_at,
    ends_at,
    of_row_at,
    shift_at,
    gain_at,
    statistics_at,
    of_product_at,
    sums_at,
    rows,
    groups,
    seed_at,
    threshold,
    kept_scale,
    CENTRED: tl.constexpr,
    KINDS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    column, column_inside = row_columns(WIDTH, COLUMNS)
    begin, stop, total = part_rows(program, programs, ends_at, groups)
    while begin < stop:
        group, end = segment_at(begin, stop, ends_at, of_row_at)
        entry = group * WIDTH + column
        gain = tl.load(gain_at + entry, mask=column_inside, other=0.0)
        shift = 0.0
        if shift_at is not None:
            shift = tl.load(shift_at + entry, mask=column_inside, other=0.0).to(tl.float32)[None, :]
        of_gain = tl.zeros([COLUMNS], dtype=tl.float32)
        of_bias = tl.zeros([COLUMNS], dtype=tl.float32)
        of_shift = tl.zeros([COLUMNS], dtype=tl.float32)
        for start in tl.range(begin, end, ROWS, num_stages=STAGES):
            row, row_inside, offset, inside = tile_rows(start, end, column, column_inside, WIDTH, ROWS)
            hidden = _rectified(tl.load(product_at + offset, mask=inside, other=0.0), shift)
            if seed_at is not None:
                hidden *= tl.where(is_kept(seed_at, offset, threshold), kept_scale, 0.0)
            gradient = tl.load(gradient_at + offset, mask=inside, other=0.0).to(tl.float32)
            standard, inverse = standard_rows(hidden, statistics_at, row, row_inside, rows, CENTRED)
            of_hidden = of_normalized(gradient, standard, inverse, gain, CENTRED, WIDTH)
            of_before = tl.where(hidden <= 0.0, 0.0, kept_scale * of_hidden)
            tl.store(of_product_at + offset, of_before.to(of_product_at.dtype.element_ty), mask=inside)
            of_gain += tl.sum(gradient * standard, axis=0)
            if CENTRED:
                of_bias += tl.sum(gradient, axis=0)
            if shift_at is not None:
                of_shift += tl.sum(of_before, axis=0)
        sum_at = sums_at + (program + group) * KINDS * WIDTH + column
        tl.store(sum_at, of_gain, mask=column_inside)
        if CENTRED:
            sum_at += WIDTH
            tl.store(sum_at, of_bias, mask=column_inside)
        if shift_at is not None:
            tl.store(sum_at + WIDTH, of_shift, mask=column_inside)
        begin = end
    for start in range(total + program * ROWS, rows, programs * ROWS):
        _, _, offset, inside = tile_rows(start, rows, column, column_inside, WIDTH, ROWS)
        tl.store(of_product_at + offset, tl.zeros([ROWS, COLUMNS], dtype=of_product_at.dtype.element_ty), mask=inside)


@triton.jit
def _rectified(product, shift):
    """relu(product + shift), not rounded in between; NaN stays NaN."""
    before = product.to(tl.float32) + shift
    return tl.where(before <= 0.0, 0.0, before)
