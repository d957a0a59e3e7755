"""The kernels of normed_network.py: the product whose tiles go backward through norm and ReLU before they are written, and what
they have to know of each row."""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kilolayer.layers.fused_norm_kernel import row_columns, tile, tile_rows
from kilolayer.layers.masked_product_kernel import BLOCK_COLUMNS, BLOCK_ROWS, GROUP, STEP, multiply_tile, own_tile

ROW = {"per_warp": 512, "fewest": 1, "per_thread": 32}
"""Few warps on a row: they need not wait for each other's sums."""
HALF = BLOCK_COLUMNS // 2
"""Columns of a tile that are finished at once: those of a whole one, and what belongs to them, are more than registers hold."""


def weigh(weight: Tensor, gain: Tensor, bias: Tensor, last_bias: Tensor | None, weighed: Tensor) -> None:
    """Write W gain, and W bias + last_bias, into `weighed` [2, dim]; weight [dim, width], dense."""
    dim, width = weight.shape
    _weigh[(dim,)](weight, gain, bias, last_bias, weighed, dim, WIDTH=width, COLUMNS=triton.next_power_of_2(width), num_warps=4)


def find_coefficients(
    gradient: Tensor,
    y: Tensor,
    weighed_gain: Tensor | None,
    offset: Tensor | None,
    statistics: Tensor,
    coefficients: Tensor,
    width: int,
) -> None:
    """Write the coefficients of each row: what h is multiplied by and, for LayerNorm, what is added. [1 or 2, rows].

    gradient and y [rows, dim], dense; weighed_gain and offset [dim].
    """
    rows, dim = gradient.shape
    shape = tile(dim, **ROW)
    _find_coefficients[(triton.cdiv(rows, shape["ROWS"]),)](
        gradient, y, weighed_gain, offset, statistics, coefficients, rows, 1 / width, DIM=dim, **shape
    )


def multiply_and_go_back(
    gradient: Tensor,
    weight: Tensor,
    hidden: Tensor,
    gain: Tensor,
    statistics: Tensor,
    coefficients: Tensor,
    passed: Tensor,
    sums: Tensor,
) -> None:
    """Write the gradient of what the ReLU read into `passed`, and sums over BLOCK_ROWS rows each: of gain, bias, and itself.

    gradient [rows, dim], weight [dim, width], hidden and passed [rows, width]: dense, rows that begin at multiples of 16 bytes;
    sums [blocks of rows, 2 or 3, width].
    """
    (rows, dim), width = gradient.shape, weight.shape[1]
    _multiply_and_go_back[(triton.cdiv(rows, BLOCK_ROWS) * triton.cdiv(width, BLOCK_COLUMNS),)](
        TensorDescriptor.from_tensor(gradient, [BLOCK_ROWS, STEP]),
        TensorDescriptor.from_tensor(weight, [STEP, BLOCK_COLUMNS]),
        TensorDescriptor.from_tensor(hidden, [BLOCK_ROWS, HALF]),
        TensorDescriptor.from_tensor(passed, [BLOCK_ROWS, HALF]),
        gain,
        statistics,
        coefficients,
        sums,
        rows,
        width,
        dim,
        CENTRED=statistics.shape[0] == 2,
        ROWS=BLOCK_ROWS,
        COLUMNS=BLOCK_COLUMNS,
        STEP=STEP,
        GROUP=GROUP,
        num_warps=4,
        num_stages=3,
    )


@triton.jit
def _weigh(weight_at, gain_at, bias_at, last_bias_at, weighed_at, dim, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    output = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    weight = tl.load(weight_at + output.to(tl.int64) * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    gain, bias = tl.load(gain_at + column, mask=inside, other=0.0), tl.load(bias_at + column, mask=inside, other=0.0)
    offset = tl.sum(weight * bias)
    if last_bias_at is not None:
        offset += tl.load(last_bias_at + output).to(tl.float32)
    tl.store(weighed_at + output, tl.sum(weight * gain))
    tl.store(weighed_at + dim + output, offset)


@triton.jit(do_not_specialize=["rows"])
def _find_coefficients(
    gradient_at,
    y_at,
    weighed_gain_at,
    offset_at,
    statistics_at,
    coefficients_at,
    rows,
    share,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column, column_inside = row_columns(DIM, COLUMNS)
    row, row_inside, place, inside = tile_rows(tl.program_id(0) * ROWS, rows, column, column_inside, DIM, ROWS)
    gradient = tl.load(gradient_at + place, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_at + place, mask=inside, other=0.0).to(tl.float32)
    if offset_at is not None:
        y -= tl.load(offset_at + column, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    along = share * tl.sum(gradient * y, axis=1)
    if weighed_gain_at is None:
        inverse = tl.load(statistics_at + row, mask=row_inside, other=0.0)
        tl.store(coefficients_at + row, -inverse * inverse * along, mask=row_inside)
    else:
        weighed_gain = tl.load(weighed_gain_at + column, mask=column_inside, other=0.0)
        mean = tl.load(statistics_at + row, mask=row_inside, other=0.0)
        inverse = tl.load(statistics_at + rows + row, mask=row_inside, other=0.0)
        slope = -inverse * inverse * along
        of_mean = share * tl.sum(gradient * weighed_gain[None, :], axis=1)
        tl.store(coefficients_at + row, slope, mask=row_inside)
        tl.store(coefficients_at + rows + row, -slope * mean - inverse * of_mean, mask=row_inside)


@triton.jit(do_not_specialize=["rows"])
def _multiply_and_go_back(
    gradient,
    weight,
    hidden,
    passed,
    gain_at,
    statistics_at,
    coefficients_at,
    sums_at,
    rows,
    width,
    dim,
    CENTRED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
):
    down, across = own_tile(rows, width, ROWS, COLUMNS, GROUP)
    row, column = down * ROWS, across * COLUMNS
    total = multiply_tile(gradient, weight, row, column, dim, ROWS, COLUMNS, STEP)
    HALF: tl.constexpr = COLUMNS // 2
    left, right = tl.split(tl.permute(tl.reshape(total, [ROWS, 2, HALF]), [0, 2, 1]))
    sums_at += down.to(tl.int64) * (3 if CENTRED else 2) * width
    _go_back(
        left, hidden, passed, row, column, gain_at, statistics_at, coefficients_at, sums_at, rows, width, CENTRED, ROWS, HALF
    )
    _go_back(
        right,
        hidden,
        passed,
        row,
        column + HALF,
        gain_at,
        statistics_at,
        coefficients_at,
        sums_at,
        rows,
        width,
        CENTRED,
        ROWS,
        HALF,
    )


@triton.jit
def _go_back(
    total,
    hidden,
    passed,
    first_row,
    first_column,
    gain_at,
    statistics_at,
    coefficients_at,
    sums_at,
    rows,
    width,
    CENTRED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Through norm and ReLU, from the gradient of the norm's output."""
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    row_inside, inside = row < rows, column < width
    # Outside of the tensors zeros are read, and nothing is written.
    kept = hidden.load([first_row, first_column])
    value = kept.to(tl.float32)
    inverse = tl.load(statistics_at + (rows if CENTRED else 0) + row, mask=row_inside, other=0.0)[:, None]
    slope = tl.load(coefficients_at + row, mask=row_inside, other=0.0)[:, None]
    gain = tl.load(gain_at + column, mask=inside, other=0.0)[None, :]
    of_value = total * inverse * gain + value * slope
    if CENTRED:
        of_value += tl.load(coefficients_at + rows + row, mask=row_inside, other=0.0)[:, None]
        value -= tl.load(statistics_at + row, mask=row_inside, other=0.0)[:, None]
    of_value = tl.where(kept <= 0.0, 0.0, of_value)
    passed.store([first_row, first_column], of_value.to(kept.dtype))
    # One reduction for all sums: one after the other they hold more registers.
    sums_at += column
    if CENTRED:
        of_gain, of_bias, itself = tl.reduce((total * (value * inverse), total, of_value), 0, _add_three)
        tl.store(sums_at + width, of_bias, mask=inside)
        tl.store(sums_at + 2 * width, itself, mask=inside)
    else:
        of_gain, itself = tl.reduce((total * (value * inverse), of_value), 0, _add_two)
        tl.store(sums_at + width, itself, mask=inside)
    tl.store(sums_at, of_gain, mask=inside)


@triton.jit
def _add_two(a, b, also_a, also_b):
    return a + also_a, b + also_b


@triton.jit
def _add_three(a, b, c, also_a, also_b, also_c):
    return a + also_a, b + also_b, c + also_c
