"""The kernels of fused_norm.py: each program reads whole rows, and each row once.

The threads of a program are arranged along a row, so that each sums its own columns in registers.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kilolayer.speed.operators.random_bits import Draw
from kilolayer.speed.operators.random_bits_kernel import is_kept

VECTOR: tl.constexpr = tl.constexpr(4)
"""Elements that a thread reads at once, in fp32 and half precision alike: with one layout, threads exchange only sums."""
FORWARD = {"per_warp": 512, "fewest": 1, "per_thread": 16}  # few warps per row: less waiting for each other's sums
INNER_FORWARD = {**FORWARD, "per_thread": 32}  # half precision needs half the registers
BACKWARD = {"per_warp": 256, "fewest": 4}  # more warps, so that each thread holds the sums of few columns
RESIDUAL_BACKWARD = {**BACKWARD, "per_thread": 8}
INNER_BACKWARD = {**BACKWARD, "per_thread": 16}
STAGES = 3
"""Pipeline stages of a backward program's loop: while it processes some rows, those of the next STAGES - 1 steps are loaded."""
WIDEST_IN_STAGES = 2048
"""Largest width for which the prefetched rows fit into shared memory on every GPU that supports such loads."""


def add_and_normalize(
    x: Tensor,
    y: Tensor,
    shift: Tensor | None,
    omega: Tensor | None,
    skip: float,
    branch: float,
    gain: Tensor,
    bias: Tensor | None,
    eps: float,
    precise: Tensor,
    rounded: Tensor,
    statistics: Tensor,
    keeps_sum: bool,
    draw: Draw,
    samples: Tensor | None,
) -> None:
    """Write N(skip * omega * x + branch * samples * drop(y + shift)) to `precise` and `rounded`, and the statistics.

    keeps_sum: write the sum itself to `precise`. samples: one factor per sample; each sample has the same number of rows.
    """
    rows, width = x.shape
    shape = tile(width, **FORWARD)
    grid = (triton.cdiv(rows, shape["ROWS"]),)
    _add_and_normalize[grid](
        x,
        y,
        shift,
        omega,
        skip,
        branch * draw.scale,
        gain,
        bias,
        eps,
        precise,
        rounded,
        statistics,
        rows,
        draw.seed,
        draw.threshold,
        samples,
        _rows_of_sample(rows, samples),
        KEEPS_SUM=keeps_sum,
        WIDTH=width,
        **shape,
    )


def add_and_normalize_backward(
    of_precise: Tensor | None,
    of_rounded: Tensor | None,
    added: Tensor | None,
    x: Tensor | None,
    y: Tensor | None,
    shift: Tensor | None,
    omega: Tensor | None,
    skip: float,
    branch: float,
    gain: Tensor,
    statistics: Tensor,
    of_x: Tensor,
    of_y: Tensor,
    sums: Tensor,
    learned: bool,
    draw: Draw,
    samples: Tensor | None,
) -> None:
    """Write the gradients of x and y, and each program's partial sums for the gradients of gain, bias, shift and omega.

    added: the sum, if it was kept; `of_precise` is then its gradient, x is read only if omega is learned, and y is not read.
    """
    (kinds, rows), (width,) = statistics.shape, gain.shape
    _add_and_normalize_backward[(sums.shape[0],)](
        of_precise,
        of_rounded,
        added,
        x,
        y,
        shift,
        omega,
        skip,
        branch * draw.scale,
        gain,
        statistics,
        of_x,
        of_y,
        sums,
        rows,
        draw.seed,
        draw.threshold,
        samples,
        _rows_of_sample(rows, samples),
        CENTRED=kinds == 2,
        LEARNED=learned,
        KINDS=sums.shape[1],
        WIDTH=width,
        STAGES=STAGES if width <= WIDEST_IN_STAGES else 1,
        **tile(width, **RESIDUAL_BACKWARD),
    )


def _rows_of_sample(rows: int, samples: Tensor | None) -> int:
    return rows if samples is None else rows // max(len(samples), 1)


def normalize(x: Tensor, gain: Tensor, bias: Tensor | None, eps: float, normed: Tensor, statistics: Tensor) -> None:
    """Write N(x) to `normed`, and the mean and 1 / standard deviation of each row to `statistics`."""
    rows, width = x.shape
    shape = tile(width, **INNER_FORWARD)
    _normalize[(triton.cdiv(rows, shape["ROWS"]),)](x, gain, bias, eps, normed, statistics, rows, WIDTH=width, **shape)


def normalize_backward(
    gradient: Tensor, x: Tensor, gain: Tensor, statistics: Tensor, of_x: Tensor, sums: Tensor, rectified: bool, scale: float
) -> None:
    """Write the gradient of x, and each program's partial sums for those of gain and bias.

    rectified: write the gradient of the ReLU's input instead, times `scale`, and also its sums over rows.
    """
    rows, width = x.shape
    centred = statistics.shape[0] == 2
    _normalize_backward[(sums.shape[0],)](
        gradient,
        x,
        gain,
        statistics,
        of_x,
        sums,
        rows,
        scale,
        CENTRED=centred,
        RECTIFIED=rectified,
        KINDS=sums.shape[1],
        WIDTH=width,
        STAGES=STAGES if width <= WIDEST_IN_STAGES else 1,
        **tile(width, **INNER_BACKWARD),
    )


def tile(width: int, per_warp: int, fewest: int, per_thread: int, most: int = 8) -> dict[str, Any]:
    """The number of rows that a program reads at once, the width rounded up to a power of two, and the warps along a row.

    per_warp: columns per warp; fewest and most: limits for the number of warps; per_thread: elements of each tensor.
    """
    columns = triton.next_power_of_2(width)
    warps = min(max(columns // per_warp, fewest), most)
    return {"ROWS": max(32 * warps * per_thread // columns, 1), "COLUMNS": columns, "num_warps": warps}


@triton.jit(do_not_specialize=["rows", "threshold", "rows_of_sample"])
def _add_and_normalize(
    x_at,
    y_at,
    shift_at,
    omega_at,
    skip,
    branch,
    gain_at,
    bias_at,
    eps,
    precise_at,
    rounded_at,
    statistics_at,
    rows,
    seed_at,
    threshold,
    samples_at,
    rows_of_sample,
    KEEPS_SUM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column, column_inside = row_columns(WIDTH, COLUMNS)
    row, row_inside, offset, inside = tile_rows(tl.program_id(0) * ROWS, rows, column, column_inside, WIDTH, ROWS)
    x = tl.load(x_at + offset, mask=inside, other=0.0)
    y = tl.load(y_at + offset, mask=inside, other=0.0)
    factor, shift = _vectors(skip, omega_at, shift_at, column, column_inside)
    branch = _branch_scale(branch, seed_at, threshold, samples_at, rows_of_sample, row, row_inside, offset)
    added = factor * x + branch * (y.to(tl.float32) + shift)
    normed = _normed(added, gain_at, bias_at, eps, statistics_at, row, row_inside, rows, column, column_inside, WIDTH)
    tl.store(precise_at + offset, added if KEEPS_SUM else normed, mask=inside)
    tl.store(rounded_at + offset, normed.to(rounded_at.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "threshold", "rows_of_sample"])
def _add_and_normalize_backward(
    of_precise_at,
    of_rounded_at,
    added_at,
    x_at,
    y_at,
    shift_at,
    omega_at,
    skip,
    branch,
    gain_at,
    statistics_at,
    of_x_at,
    of_y_at,
    sums_at,
    rows,
    seed_at,
    threshold,
    samples_at,
    rows_of_sample,
    CENTRED: tl.constexpr,
    LEARNED: tl.constexpr,
    KINDS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    column, column_inside = row_columns(WIDTH, COLUMNS)
    gain = tl.load(gain_at + column, mask=column_inside, other=0.0)
    factor, shift = _vectors(skip, omega_at, shift_at, column, column_inside)
    of_gain = tl.zeros([COLUMNS], dtype=tl.float32)
    of_bias = tl.zeros([COLUMNS], dtype=tl.float32)
    of_shift = tl.zeros([COLUMNS], dtype=tl.float32)
    of_omega = tl.zeros([COLUMNS], dtype=tl.float32)
    for start in tl.range(program * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row, row_inside, offset, inside = tile_rows(start, rows, column, column_inside, WIDTH, ROWS)
        scale = _branch_scale(branch, seed_at, threshold, samples_at, rows_of_sample, row, row_inside, offset)
        if added_at is None:
            x = tl.load(x_at + offset, mask=inside, other=0.0)
            y = tl.load(y_at + offset, mask=inside, other=0.0)
            added = factor * x + scale * (y.to(tl.float32) + shift)
        else:
            added = tl.load(added_at + offset, mask=inside, other=0.0)
            x = tl.load(x_at + offset, mask=inside, other=0.0) if LEARNED else 0.0
        of_precise = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        gradient = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        if of_precise_at is not None:
            of_precise += tl.load(of_precise_at + offset, mask=inside, other=0.0)
        if of_rounded_at is not None:
            gradient += tl.load(of_rounded_at + offset, mask=inside, other=0.0).to(tl.float32)
        if added_at is None:
            gradient += of_precise
        standard, inverse = standard_rows(added, statistics_at, row, row_inside, rows, CENTRED)
        of_added = of_normalized(gradient, standard, inverse, gain, CENTRED, WIDTH)
        if added_at is not None:
            of_added += of_precise
        of_branch = scale * of_added
        tl.store(of_x_at + offset, factor * of_added, mask=inside)
        tl.store(of_y_at + offset, of_branch.to(of_y_at.dtype.element_ty), mask=inside)
        of_gain += tl.sum(gradient * standard, axis=0)
        if CENTRED:
            of_bias += tl.sum(gradient, axis=0)
        if shift_at is not None:
            of_shift += tl.sum(of_branch, axis=0)
        if LEARNED:
            of_omega += tl.sum(of_added * x, axis=0)
    sum_at = sums_at + program * KINDS * WIDTH + column
    tl.store(sum_at, of_gain, mask=column_inside)
    if CENTRED:
        sum_at += WIDTH
        tl.store(sum_at, of_bias, mask=column_inside)
    if shift_at is not None:
        sum_at += WIDTH
        tl.store(sum_at, of_shift, mask=column_inside)
    if LEARNED:
        sum_at += WIDTH
        tl.store(sum_at, skip * of_omega, mask=column_inside)


@triton.jit(do_not_specialize=["rows"])
def _normalize(
    x_at,
    gain_at,
    bias_at,
    eps,
    normed_at,
    statistics_at,
    rows,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column, column_inside = row_columns(WIDTH, COLUMNS)
    row, row_inside, offset, inside = tile_rows(tl.program_id(0) * ROWS, rows, column, column_inside, WIDTH, ROWS)
    x = tl.load(x_at + offset, mask=inside, other=0.0).to(tl.float32)
    normed = _normed(x, gain_at, bias_at, eps, statistics_at, row, row_inside, rows, column, column_inside, WIDTH)
    tl.store(normed_at + offset, normed.to(normed_at.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _normalize_backward(
    gradient_at,
    x_at,
    gain_at,
    statistics_at,
    of_x_at,
    sums_at,
    rows,
    scale,
    CENTRED: tl.constexpr,
    RECTIFIED: tl.constexpr,
    KINDS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    column, column_inside = row_columns(WIDTH, COLUMNS)
    gain = tl.load(gain_at + column, mask=column_inside, other=0.0)
    of_gain = tl.zeros([COLUMNS], dtype=tl.float32)
    of_bias = tl.zeros([COLUMNS], dtype=tl.float32)
    of_input = tl.zeros([COLUMNS], dtype=tl.float32)
    for start in tl.range(program * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row, row_inside, offset, inside = tile_rows(start, rows, column, column_inside, WIDTH, ROWS)
        x = tl.load(x_at + offset, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(gradient_at + offset, mask=inside, other=0.0).to(tl.float32)
        standard, inverse = standard_rows(x, statistics_at, row, row_inside, rows, CENTRED)
        of_x = of_normalized(gradient, standard, inverse, gain, CENTRED, WIDTH)
        if RECTIFIED:
            of_x = tl.where(x <= 0.0, 0.0, scale * of_x)
            of_input += tl.sum(of_x, axis=0)
        tl.store(of_x_at + offset, of_x.to(of_x_at.dtype.element_ty), mask=inside)
        of_gain += tl.sum(gradient * standard, axis=0)
        if CENTRED:
            of_bias += tl.sum(gradient, axis=0)
    sum_at = sums_at + program * KINDS * WIDTH + column
    tl.store(sum_at, of_gain, mask=column_inside)
    if CENTRED:
        sum_at += WIDTH
        tl.store(sum_at, of_bias, mask=column_inside)
    if RECTIFIED:
        tl.store(sum_at + WIDTH, of_input, mask=column_inside)


@triton.jit
def row_columns(WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """The columns of a tile, and which of them are inside the row."""
    column = tl.max_contiguous(tl.arange(0, COLUMNS), VECTOR)
    return column, column < WIDTH


@triton.jit
def tile_rows(start, rows, column, column_inside, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """The rows of a tile, which of them are below `rows`, the offsets of their elements, and which of those are inside."""
    row = start + tl.arange(0, ROWS)
    row_inside = row < rows
    offset = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    return row, row_inside, offset, row_inside[:, None] & column_inside[None, :]


@triton.jit
def _vectors(skip, omega_at, shift_at, column, column_inside):
    """The factor of x, and the shift of y: numbers, or vectors over columns."""
    factor, shift = skip, 0.0
    if omega_at is not None:
        factor *= tl.load(omega_at + column, mask=column_inside, other=0.0)[None, :]
    if shift_at is not None:
        shift = tl.load(shift_at + column, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    return factor, shift


@triton.jit
def _branch_scale(branch, seed_at, threshold, samples_at, rows_of_sample, row, row_inside, offset):
    """The factor of the branch: a number, or one per row (drop path), or one per element (dropout)."""
    if samples_at is not None:
        branch *= tl.load(samples_at + row // rows_of_sample, mask=row_inside, other=0.0)[:, None]
    if seed_at is not None:
        branch = tl.where(is_kept(seed_at, offset, threshold), branch, 0.0)
    return branch


@triton.jit
def _normed(added, gain_at, bias_at, eps, statistics_at, row, row_inside, rows, column, column_inside, WIDTH: tl.constexpr):
    """The norm of each row; stores its mean (LayerNorm only) and 1 / standard deviation."""
    gain = tl.load(gain_at + column, mask=column_inside, other=0.0)[None, :]
    CENTRED: tl.constexpr = bias_at is not None
    normed = standardize(added, eps, statistics_at, row, row_inside, rows, column_inside, CENTRED, WIDTH) * gain
    if bias_at is not None:
        normed += tl.load(bias_at + column, mask=column_inside, other=0.0)[None, :]
    return normed


@triton.jit
def standardize(added, eps, statistics_at, row, row_inside, rows, column_inside, CENTRED: tl.constexpr, WIDTH: tl.constexpr):
    """The standardized rows, before gain and bias; stores their means (LayerNorm only) and 1 / standard deviations."""
    centred = added
    if CENTRED:
        mean = tl.sum(added, axis=1) / WIDTH
        tl.store(statistics_at + row, mean, mask=row_inside)
        statistics_at += rows
        centred = tl.where(column_inside[None, :], added - mean[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, axis=1) / WIDTH + eps)
    tl.store(statistics_at + row, inverse, mask=row_inside)
    return centred * inverse[:, None]


@triton.jit
def standard_rows(added, statistics_at, row, row_inside, rows, CENTRED: tl.constexpr):
    """The standardized rows, before gain and bias, from stored statistics, and 1 / standard deviations."""
    if CENTRED:
        added -= tl.load(statistics_at + row, mask=row_inside, other=0.0)[:, None]
        statistics_at += rows
    inverse = tl.load(statistics_at + row, mask=row_inside, other=0.0)[:, None]
    return added * inverse, inverse


@triton.jit
def of_normalized(gradient, standard, inverse, gain, CENTRED: tl.constexpr, WIDTH: tl.constexpr):
    """The gradient of a norm's input: (w - mean(w) - n mean(w n)) / deviation, w = gain * gradient, n the standardized row."""
    weighted = gradient * gain[None, :]
    if CENTRED:
        along, total = tl.reduce((weighted * standard, weighted), 1, _add_pairs)
        weighted -= (total / WIDTH)[:, None]
    else:
        along = tl.sum(weighted * standard, axis=1)
    return (weighted - standard * (along / WIDTH)[:, None]) * inverse


@triton.jit
def _add_pairs(first, second, other_first, other_second):
    return first + other_first, second + other_second
