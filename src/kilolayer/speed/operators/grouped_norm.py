"""Fused bias, ReLU, dropout and norm after a grouped matrix product on a GPU: one pass over the rows, forward and backward.

Each group has its own bias and its own norm. Only the product is saved for the backward pass, which also computes the gradients
of the three vectors of each group, in a time that does not depend on how the rows are distributed over the groups. On the CPU
the same operators run plain formulas, which the kernels are tested against.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kilolayer.speed.operators import kernels, random_bits
from kilolayer.speed.operators.fused_norm import (
    empty_contiguous,
    empty_statistics,
    empty_totals,
    fits_row_kernels,
    normalized,
    of_normalized,
)
from kilolayer.speed.operators.grouped import cut, group_sums
from kilolayer.speed.operators.random_bits import draw_of


def can_fuse_grouped_norm(device: torch.device, precise: torch.dtype, rounded: torch.dtype, width: int) -> bool:
    """Whether `grouped_relu_norm` has a kernel for products of dtype `rounded` and this width, normalized in `precise`."""
    return fits_row_kernels(precise, rounded, width) and kernels.runs_on(device, "grouped_norm")


@torch.library.custom_op("kilolayer::grouped_relu_norm", mutates_args=(), device_types="cuda")
def grouped_relu_norm(
    product: Tensor,
    ends: Tensor,
    of_row: Tensor,
    shift: Tensor | None,
    gain: Tensor,
    bias: Tensor | None,
    eps: float,
    seed: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute N_e(drop(relu(p + shift_e))) for the rows p of each group e, in the gain's dtype, rounded to the product's dtype.

    product: [rows, width]; rows after the last group may hold anything. ends, of_row: as in `Groups`. shift, gain, bias:
    [groups, width]; without bias the norm is RMSNorm. seed: int64 [1], for the dropout of random_bits.py; None: no dropout.
    Returns the result, [rows, width], and the statistics of each row, [1 or 2, rows]: the mean (LayerNorm only) and 1 /
    standard deviation. Both are 0 after the last group.
    """
    from kilolayer.speed.operators.grouped_norm_kernel import normalize

    product = product.contiguous()
    normed, statistics = empty_contiguous(product), empty_statistics(product, gain.dtype, bias is not None)
    normalize(product, ends, of_row, shift, gain, bias, eps, normed, statistics, draw_of(seed, dropout))
    return normed, statistics


@torch.library.custom_op("kilolayer::grouped_relu_norm_backward", mutates_args=(), device_types="cuda")
def grouped_relu_norm_backward(
    gradient: Tensor,
    product: Tensor,
    ends: Tensor,
    of_row: Tensor,
    shift: Tensor | None,
    gain: Tensor,
    statistics: Tensor,
    seed: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of the product, 0 after the last group, and of gain, bias (LayerNorm only) and shift, if any."""
    from kilolayer.speed.operators.group_sums_kernel import add_up_segments, empty_sums
    from kilolayer.speed.operators.grouped_norm_kernel import normalize_backward

    gradient, product = gradient.contiguous(), product.contiguous()
    of_product, totals = empty_contiguous(product), empty_totals(statistics, gain, shift)
    sums = empty_sums(totals)
    draw = draw_of(seed, dropout)
    normalize_backward(gradient, product, ends, of_row, shift, gain, statistics, of_product, sums, draw)
    add_up_segments(sums, ends, totals)
    return of_product, totals


@grouped_relu_norm.register_kernel("cpu")
def _(
    product: Tensor,
    ends: Tensor,
    of_row: Tensor,
    shift: Tensor | None,
    gain: Tensor,
    bias: Tensor | None,
    eps: float,
    seed: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    hidden = random_bits.dropout(_rectified(product, ends, of_row, shift, gain.dtype), seed, dropout)
    normed, statistics = normalized(hidden, gain[of_row], None if bias is None else bias[of_row], eps)
    return cut(normed.to(product.dtype), ends), cut(statistics.t(), ends).t().contiguous()


@grouped_relu_norm_backward.register_kernel("cpu")
def _(
    gradient: Tensor,
    product: Tensor,
    ends: Tensor,
    of_row: Tensor,
    shift: Tensor | None,
    gain: Tensor,
    statistics: Tensor,
    seed: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, list[Tensor]]:
    hidden = random_bits.dropout(_rectified(product, ends, of_row, shift, gain.dtype), seed, dropout)
    of_normed = cut(gradient.to(gain.dtype), ends)
    of_hidden, terms = of_normalized(of_normed, hidden, gain[of_row], statistics)
    of_before = torch.where(hidden <= 0, 0.0, draw_of(seed, dropout).scale * of_hidden)
    totals = [group_sums(each, ends, of_row) for each in terms]
    if shift is not None:
        totals.append(group_sums(of_before, ends, of_row).to(shift.dtype))
    return of_before.to(product.dtype).contiguous(), totals


def _rectified(product: Tensor, ends: Tensor, of_row: Tensor, shift: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Compute relu(p + shift_e), [rows, width], without rounding in between."""
    before = product.to(dtype).contiguous()
    return cut(before if shift is None else before + shift.to(dtype)[of_row], ends).relu()


@grouped_relu_norm.register_fake
def _(
    product: Tensor, ends: Tensor, of_row: Tensor, shift: Tensor | None, gain: Tensor, bias: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    return empty_contiguous(product), empty_statistics(product, gain.dtype, bias is not None)


@grouped_relu_norm_backward.register_fake
def _(
    gradient: Tensor,
    product: Tensor,
    ends: Tensor,
    of_row: Tensor,
    shift: Tensor | None,
    gain: Tensor,
    statistics: Tensor,
    *_: Any,
) -> tuple[Tensor, list[Tensor]]:
    return empty_contiguous(product), empty_totals(statistics, gain, shift)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *given, gain, _, _, seed, ctx.dropout = inputs
    ctx.save_for_backward(*given, gain, output[1], seed)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor | None, ...]:
    *given, statistics, seed = ctx.saved_tensors
    of_product, totals = grouped_relu_norm_backward(gradient, *given, statistics, seed, ctx.dropout)
    rest = iter(totals)
    of_gain = next(rest)
    of_bias = next(rest) if statistics.shape[0] == 2 else None
    return of_product, None, None, next(rest, None), of_gain, of_bias, None, None, None


grouped_relu_norm.register_autograd(_backward, setup_context=_setup_context)
