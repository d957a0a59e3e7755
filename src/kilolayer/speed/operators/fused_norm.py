"""Norms on a GPU in one pass over their rows, forward and backward, fused with the operations around them.

`residual_norm` is the end of a sublayer: scales, dropout, addition and norm. It writes two outputs, a precise one for the next
residual and a rounded one for the next product, so that neither the rounding nor the sum of their gradients is a separate pass.
If the norm is the sublayer's own (Post-LN), both outputs are the norm; if it belongs to the next sublayer (Pre-LN), the precise
one is the sum. It also adds the bias of the product before it, whose gradient is then computed together with the norm's.
`inner_norm` is the norm between two products. Both compute in fp32 and keep two numbers per row for the backward pass. On the
CPU the same operators run plain formulas, which the kernels are tested against.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kilolayer.speed.operators import kernels, random_bits
from kilolayer.speed.operators.random_bits import draw_of

HALF = (torch.bfloat16, torch.float16)
WIDEST = 8192
PARTS = 264
"""Number of parts into which sums over rows are split: two per multiprocessor, for any number of rows."""


def can_fuse_residual_norm(device: torch.device, precise: torch.dtype, rounded: torch.dtype, width: int) -> bool:
    """Whether `residual_norm` has a kernel here for rows of this width, a residual in `precise` and products in `rounded`."""
    return fits_row_kernels(precise, rounded, width) and kernels.runs_on(device, "residual_norm")


def can_fuse_inner_norm(device: torch.device, precise: torch.dtype, rounded: torch.dtype, width: int) -> bool:
    """Whether `inner_norm` has a kernel here for rows of this width in `rounded`, normalized in `precise`."""
    return fits_row_kernels(precise, rounded, width) and kernels.runs_on(device, "inner_norm")


def fits_row_kernels(precise: torch.dtype, rounded: torch.dtype, width: int) -> bool:
    """Whether the kernels that normalize rows take these dtypes and this width."""
    return precise == torch.float32 and rounded in HALF and width % 8 == 0 and width <= WIDEST


@torch.library.custom_op("kilolayer::residual_norm", mutates_args=(), device_types="cuda")
def residual_norm(
    x: Tensor,
    y: Tensor,
    shift: Tensor | None,
    omega: Tensor | None,
    skip: float,
    branch: float,
    gain: Tensor,
    bias: Tensor | None,
    eps: float,
    keeps_sum: bool,
    seed: Tensor | None = None,
    dropout: float = 0.0,
    samples: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of s = skip * omega * x + branch * samples * drop(y + shift).

    Returns N(s) in the dtype of x (with keeps_sum: s itself), N(s) in the dtype of y, and the statistics of the rows of s: mean
    (LayerNorm only) and 1 / standard deviation, [1 or 2, rows].
    x and y: [batch, ..., width]; shift, omega, gain and bias: [width]; without bias the norm is RMSNorm. drop is dropout drawn
    by random_bits.py from `seed`, int64 with one element; without a seed there is no dropout. samples: fp32 [batch], a factor
    for each sample, for drop path.
    """
    from kilolayer.speed.operators.fused_norm_kernel import add_and_normalize

    x, y = x.contiguous(), y.contiguous()
    precise, rounded, statistics = torch.empty_like(x), torch.empty_like(y), empty_statistics(x, x.dtype, bias is not None)
    terms = (_rows(x), _rows(y), shift, omega, skip, branch)
    add_and_normalize(*terms, gain, bias, eps, precise, rounded, statistics, keeps_sum, draw_of(seed, dropout), samples)
    return precise, rounded, statistics


@torch.library.custom_op("kilolayer::residual_norm_backward", mutates_args=(), device_types="cuda")
def residual_norm_backward(
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
    rounded: torch.dtype,
    learned: bool,
    seed: Tensor | None = None,
    dropout: float = 0.0,
    samples: Tensor | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The gradients of x and y, and those of gain, LayerNorm's bias, shift (if present) and omega (if learned).

    of_precise, of_rounded: the gradients of the two outputs; at least one is given. added: the sum s, if it was kept; then y is
    not needed, and x only if omega is learned. rounded: the dtype of y.
    """
    from kilolayer.speed.operators.fused_norm_kernel import add_and_normalize_backward
    from kilolayer.speed.operators.partial_sums_kernel import add_up

    of_precise, of_rounded, added, x, y = (
        None if each is None else each.contiguous() for each in (of_precise, of_rounded, added, x, y)
    )
    (of_x, of_y), totals = _empty_terms(added, x, rounded), empty_totals(statistics, gain, shift, learned)
    sums = _empty_sums(totals)
    terms = (of_precise, of_rounded, added, x, y, shift, omega, skip, branch)
    add_and_normalize_backward(*terms, gain, statistics, of_x, of_y, sums, learned, draw_of(seed, dropout), samples)
    add_up(sums, totals)
    return of_x, of_y, totals


@torch.library.custom_op("kilolayer::inner_norm", mutates_args=(), device_types="cuda")
def inner_norm(x: Tensor, gain: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """N(x), computed in the dtype of the gain and rounded to that of x, and the statistics of its rows.

    x: [..., width]; gain and bias: [width]; without bias the norm is RMSNorm. Statistics as in `residual_norm`.
    """
    from kilolayer.speed.operators.fused_norm_kernel import normalize

    x = x.contiguous()
    normed, statistics = torch.empty_like(x), empty_statistics(x, gain.dtype, bias is not None)
    normalize(_rows(x), gain, bias, eps, normed, statistics)
    return normed, statistics


@torch.library.custom_op("kilolayer::inner_norm_backward", mutates_args=(), device_types="cuda")
def inner_norm_backward(
    gradient: Tensor, x: Tensor, gain: Tensor, statistics: Tensor, rectified: bool, scale: float = 1.0
) -> tuple[Tensor, list[Tensor]]:
    """The gradient of x, and those of gain and LayerNorm's bias.

    rectified: x is the output of a ReLU, multiplied by `scale` where dropout kept it; the gradient is then that of the ReLU's
    input, and its sum over rows is returned last.
    """
    from kilolayer.speed.operators.fused_norm_kernel import normalize_backward
    from kilolayer.speed.operators.partial_sums_kernel import add_up

    x = x.contiguous()
    of_x, totals = torch.empty_like(x), empty_totals(statistics, gain, x if rectified else None)
    sums = _empty_sums(totals)
    normalize_backward(gradient.contiguous(), _rows(x), gain, statistics, of_x, sums, rectified, scale)
    add_up(sums, totals)
    return of_x, totals


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, x.shape[-1])


def empty_statistics(x: Tensor, dtype: torch.dtype, centred: bool) -> Tensor:
    """An empty tensor for the statistics of the rows of x: mean (if centred) and 1 / standard deviation."""
    return x.new_empty(2 if centred else 1, x.numel() // x.shape[-1], dtype=dtype)


def _empty_terms(added: Tensor | None, x: Tensor | None, rounded: torch.dtype) -> tuple[Tensor, Tensor]:
    """Empty gradients of x, and of y in its dtype; both have the shape of the sum."""
    like = x if added is None else added
    assert like is not None
    return empty_contiguous(like), empty_contiguous(like, rounded)


def empty_totals(statistics: Tensor, gain: Tensor, shift: Tensor | None, learned: bool = False) -> list[Tensor]:
    """Empty gradients of gain, LayerNorm's bias, shift (in its dtype), and a learned omega."""
    dtypes = [gain.dtype] * statistics.shape[0] + ([] if shift is None else [shift.dtype]) + [gain.dtype] * learned
    return [gain.new_empty(gain.shape, dtype=dtype) for dtype in dtypes]


def _empty_sums(totals: list[Tensor]) -> Tensor:
    return totals[0].new_empty(PARTS, len(totals), len(totals[0]))


@residual_norm.register_kernel("cpu")
def _(
    x: Tensor,
    y: Tensor,
    shift: Tensor | None,
    omega: Tensor | None,
    skip: float,
    branch: float,
    gain: Tensor,
    bias: Tensor | None,
    eps: float,
    keeps_sum: bool,
    seed: Tensor | None = None,
    dropout: float = 0.0,
    samples: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    added = _added(x, y, shift, omega, skip, branch, seed, dropout, samples)
    normed, statistics = normalized(added, gain, bias, eps)
    return added if keeps_sum else normed, normed.to(y.dtype, copy=True), statistics


@residual_norm_backward.register_kernel("cpu")
def _(
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
    rounded: torch.dtype,
    learned: bool,
    seed: Tensor | None = None,
    dropout: float = 0.0,
    samples: Tensor | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    given = of_rounded if of_precise is None else of_precise
    assert given is not None
    nothing = torch.zeros_like(given, dtype=gain.dtype)
    of_precise = nothing if of_precise is None else of_precise
    of_normed = nothing if of_rounded is None else of_rounded.to(gain.dtype)
    if added is None:
        assert x is not None
        assert y is not None
        added = _added(x, y, shift, omega, skip, branch, seed, dropout, samples)
        of_added, terms = of_normalized(of_precise + of_normed, added, gain, statistics)
    else:
        of_added, terms = of_normalized(of_normed, added, gain, statistics)
        of_added = of_precise + of_added
    of_branch = _scaled_branch(of_added, branch, seed, dropout, samples)
    totals = [_sum_rows(each) for each in terms]
    if shift is not None:
        totals.append(_sum_rows(of_branch).to(shift.dtype))
    if learned:
        assert x is not None
        totals.append(skip * _sum_rows(of_added * x))
    factor = skip if omega is None else skip * omega
    return (factor * of_added).contiguous(), of_branch.to(rounded, copy=True).contiguous(), totals


@inner_norm.register_kernel("cpu")
def _(x: Tensor, gain: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    normed, statistics = normalized(x.to(gain.dtype).contiguous(), gain, bias, eps)
    return normed.to(x.dtype), statistics


@inner_norm_backward.register_kernel("cpu")
def _(
    gradient: Tensor, x: Tensor, gain: Tensor, statistics: Tensor, rectified: bool, scale: float = 1.0
) -> tuple[Tensor, list[Tensor]]:
    of_x, terms = of_normalized(gradient.to(gain.dtype), x.to(gain.dtype), gain, statistics)
    totals = [_sum_rows(each) for each in terms]
    if rectified:
        of_x = torch.where(x <= 0, 0.0, scale * of_x)
        totals.append(_sum_rows(of_x).to(x.dtype))
    return of_x.to(x.dtype).contiguous(), totals


def _added(
    x: Tensor,
    y: Tensor,
    shift: Tensor | None,
    omega: Tensor | None,
    skip: float,
    branch: float,
    seed: Tensor | None,
    dropout: float,
    samples: Tensor | None,
) -> Tensor:
    """skip * omega * x + branch * samples * drop(y + shift)."""
    y = y.to(x.dtype) if shift is None else y.to(x.dtype) + shift.to(x.dtype)
    added = (skip if omega is None else skip * omega) * x + _scaled_branch(y, branch, seed, dropout, samples)
    return added.contiguous()


def _scaled_branch(y: Tensor, branch: float, seed: Tensor | None, dropout: float, samples: Tensor | None) -> Tensor:
    """branch * samples * drop(y); linear in y, so it also maps the gradient of its output to that of y."""
    y = branch * random_bits.dropout(y, seed, dropout)
    return y if samples is None else y * samples.to(y.dtype).view(-1, *[1] * (y.dim() - 1))


def normalized(x: Tensor, gain: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """N(x), and the statistics of its rows. gain and bias: [width], or [rows, width]."""
    means = [] if bias is None else [x.mean(dim=-1, keepdim=True)]
    centred = x - means[0] if means else x
    inverse = (centred.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    normed = centred * inverse * gain
    return normed if bias is None else normed + bias, torch.stack([*means, inverse]).flatten(1)


def of_normalized(gradient: Tensor, x: Tensor, gain: Tensor, statistics: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The gradient of x from that of N(x), and each row's contribution to those of gain and, for LayerNorm, bias."""
    *means, inverse = statistics.view(-1, *x.shape[:-1], 1)
    standard = (x - means[0] if means else x) * inverse
    weighted = gradient * gain
    of_x = weighted - standard * (weighted * standard).mean(dim=-1, keepdim=True)
    of_x = of_x - weighted.mean(dim=-1, keepdim=True) if means else of_x
    return of_x * inverse, [gradient * standard, *(gradient for _ in means)]


def _sum_rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2).sum(dim=0)


@residual_norm.register_fake
def _(
    x: Tensor,
    y: Tensor,
    shift: Tensor | None,
    omega: Tensor | None,
    skip: float,
    branch: float,
    gain: Tensor,
    bias: Tensor | None,
    eps: float,
    keeps_sum: bool,
    seed: Tensor | None = None,
    dropout: float = 0.0,
    samples: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_contiguous(x), empty_contiguous(y), empty_statistics(x, x.dtype, bias is not None)


@residual_norm_backward.register_fake
def _(
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
    rounded: torch.dtype,
    learned: bool,
    seed: Tensor | None = None,
    dropout: float = 0.0,
    samples: Tensor | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    return *_empty_terms(added, x, rounded), empty_totals(statistics, gain, shift, learned)


@inner_norm.register_fake
def _(x: Tensor, gain: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return empty_contiguous(x), empty_statistics(x, gain.dtype, bias is not None)


@inner_norm_backward.register_fake
def _(
    gradient: Tensor, x: Tensor, gain: Tensor, statistics: Tensor, rectified: bool, scale: float = 1.0
) -> tuple[Tensor, list[Tensor]]:
    return empty_contiguous(x), empty_totals(statistics, gain, x if rectified else None)


def empty_contiguous(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty contiguous tensor with the shape of x."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _setup_residual_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, y, shift, omega, ctx.skip, ctx.branch, gain, _, _, keeps_sum, seed, ctx.dropout, samples = inputs
    precise, _, statistics = output
    ctx.rounded, ctx.learned = y.dtype, ctx.needs_input_grad[3]
    # If the sum is written, it is kept anyway as the next residual; then x is needed only for omega's gradient, and y is not.
    terms = (precise, x if ctx.learned else None, None) if keeps_sum else (None, x, y)
    ctx.save_for_backward(*terms, shift, omega, gain, statistics, seed, samples)
    ctx.set_materialize_grads(False)  # no zero gradients for unused outputs


def _residual_backward(
    ctx: Any, of_precise: Tensor | None, of_rounded: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    *terms, shift, omega, gain, statistics, seed, samples = ctx.saved_tensors
    given = (*terms, shift, omega, ctx.skip, ctx.branch, gain, statistics, ctx.rounded, ctx.learned)
    of_x, of_y, totals = residual_norm_backward(of_precise, of_rounded, *given, seed, ctx.dropout, samples)
    rest = iter(totals)
    of_gain = next(rest)
    of_bias = next(rest) if statistics.shape[0] == 2 else None
    of_shift = None if shift is None else next(rest)
    of_omega = next(rest) if ctx.learned else None
    return of_x, of_y, of_shift, of_omega, None, None, of_gain, of_bias, *[None] * 5


def _setup_inner_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, gain, _, _ = inputs
    ctx.save_for_backward(x, gain, output[1])
    ctx.set_materialize_grads(False)


def _inner_backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, gain, statistics = ctx.saved_tensors
    of_x, (of_gain, *of_bias) = inner_norm_backward(gradient, x, gain, statistics, False)
    return of_x, of_gain, of_bias[0] if of_bias else None, None


residual_norm.register_autograd(_residual_backward, setup_context=_setup_residual_context)
inner_norm.register_autograd(_inner_backward, setup_context=_setup_inner_context)
