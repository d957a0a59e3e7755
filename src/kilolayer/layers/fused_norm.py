"""Norms on a GPU in one pass over their rows, forward and backward, with what stands around them.

`residual_norm` is the end of a Post-LN sublayer: scales, addition and norm. It writes its output twice, precise for the next
residual and rounded for the next product: neither the rounding nor the sum of the two gradients is then a pass of its own. It
also adds the bias of the product before it, so that the bias's gradient comes with the norm's. `sum_and_norm` is the same where
the next sublayer begins with the norm (Pre-LN): it writes the sum, precise, and its norm, rounded. `inner_norm` stands between
two products. All compute in fp32 and keep two numbers a row. On the CPU the same operators run plain formulas, which the
kernels are tested against.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kilolayer.layers import kernels

HALF = (torch.bfloat16, torch.float16)
WIDEST = 8192
PARTS = 264
"""Into how many parts the sums over rows are split: two for each multiprocessor, the same for any number of rows."""


def serves(device: torch.device, precise: torch.dtype, rounded: torch.dtype, width: int) -> bool:
    """Whether rows can be normalised here with arithmetic in `precise` and products in `rounded`."""
    fits = width % 8 == 0 and width <= WIDEST
    return precise == torch.float32 and rounded in HALF and fits and kernels.run_on(device)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """N(skip * omega * x + branch * (y + shift)) in the dtype of x, and in that of y, and the statistics of its rows.

    x and y [..., width]; shift, omega, gain and bias [width]; without bias the norm is RMSNorm. Statistics: mean (LayerNorm
    alone) and 1 / deviation of each row, [1 or 2, rows].
    """
    from kilolayer.layers.fused_norm_kernel import add_and_normalise

    x, y = x.contiguous(), y.contiguous()
    precise, rounded, statistics = torch.empty_like(x), torch.empty_like(y), _room_for_statistics(x, x.dtype, bias is not None)
    add_and_normalise(
        _rows(x), _rows(y), shift, omega, skip, branch, gain, bias, eps, precise, rounded, statistics, keeps_sum=False
    )
    return precise, rounded, statistics


@torch.library.custom_op("kilolayer::residual_norm_backward", mutates_args=(), device_types="cuda")
def residual_norm_backward(
    of_precise: Tensor | None,
    of_rounded: Tensor | None,
    x: Tensor,
    y: Tensor,
    shift: Tensor | None,
    omega: Tensor | None,
    skip: float,
    branch: float,
    gain: Tensor,
    statistics: Tensor,
    learned: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The gradients of x and y, and those of gain, LayerNorm's bias, the shift where there is one and, where learned, omega.

    of_precise and of_rounded: the gradients of the two outputs, at least one of them.
    """
    from kilolayer.layers.fused_norm_kernel import add_and_normalise_backward
    from kilolayer.layers.partial_sums_kernel import add_up

    x, y = x.contiguous(), y.contiguous()
    of_x, of_y, totals = torch.empty_like(x), torch.empty_like(y), _room_for_totals(statistics, gain, shift, learned)
    sums = _room_for_sums(totals)
    of_precise, of_rounded = (None if each is None else each.contiguous() for each in (of_precise, of_rounded))
    add_and_normalise_backward(
        of_precise, of_rounded, None, x, y, shift, omega, skip, branch, gain, statistics, of_x, of_y, sums, learned
    )
    add_up(sums, totals)
    return of_x, of_y, totals


@torch.library.custom_op("kilolayer::sum_and_norm", mutates_args=(), device_types="cuda")
def sum_and_norm(
    x: Tensor,
    y: Tensor,
    shift: Tensor | None,
    omega: Tensor | None,
    skip: float,
    branch: float,
    gain: Tensor,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """s = skip * omega * x + branch * (y + shift) in the dtype of x, N(s) in that of y, and the statistics of the rows of s.

    Shapes and statistics as `residual_norm` has them.
    """
    from kilolayer.layers.fused_norm_kernel import add_and_normalise

    x, y = x.contiguous(), y.contiguous()
    added, normed, statistics = torch.empty_like(x), torch.empty_like(y), _room_for_statistics(x, x.dtype, bias is not None)
    add_and_normalise(
        _rows(x), _rows(y), shift, omega, skip, branch, gain, bias, eps, added, normed, statistics, keeps_sum=True
    )
    return added, normed, statistics


@torch.library.custom_op("kilolayer::sum_and_norm_backward", mutates_args=(), device_types="cuda")
def sum_and_norm_backward(
    of_added: Tensor | None,
    of_normed: Tensor | None,
    added: Tensor,
    x: Tensor | None,
    shift: Tensor | None,
    omega: Tensor | None,
    skip: float,
    branch: float,
    gain: Tensor,
    statistics: Tensor,
    rounded: torch.dtype,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The gradients of x and, in `rounded`, of y, and the others as `residual_norm_backward` has them.

    of_added and of_normed: the gradients of the two outputs, at least one of them; x: given where omega is learned.
    """
    from kilolayer.layers.fused_norm_kernel import add_and_normalise_backward
    from kilolayer.layers.partial_sums_kernel import add_up

    added, learned = added.contiguous(), x is not None
    of_added, of_normed, x = (None if each is None else each.contiguous() for each in (of_added, of_normed, x))
    of_x, of_y = torch.empty_like(added), torch.empty_like(added, dtype=rounded)
    totals = _room_for_totals(statistics, gain, shift, learned)
    sums = _room_for_sums(totals)
    add_and_normalise_backward(
        of_added, of_normed, added, x, None, shift, omega, skip, branch, gain, statistics, of_x, of_y, sums, learned
    )
    add_up(sums, totals)
    return of_x, of_y, totals


@torch.library.custom_op("kilolayer::inner_norm", mutates_args=(), device_types="cuda")
def inner_norm(x: Tensor, gain: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """N(x), computed in the dtype of the gain and rounded to that of x, and the statistics of its rows.

    x [..., width]; gain and bias [width]; without bias the norm is RMSNorm. Statistics as `residual_norm` has them.
    """
    from kilolayer.layers.fused_norm_kernel import normalise

    x = x.contiguous()
    normed, statistics = torch.empty_like(x), _room_for_statistics(x, gain.dtype, bias is not None)
    normalise(_rows(x), gain, bias, eps, normed, statistics)
    return normed, statistics


@torch.library.custom_op("kilolayer::inner_norm_backward", mutates_args=(), device_types="cuda")
def inner_norm_backward(
    gradient: Tensor, x: Tensor, gain: Tensor, statistics: Tensor, rectified: bool
) -> tuple[Tensor, list[Tensor]]:
    """The gradient of x, and those of gain and LayerNorm's bias.

    rectified: x came out of a ReLU; then the gradient is that of its input, and its sum over rows is the last of the others.
    """
    from kilolayer.layers.fused_norm_kernel import normalise_backward
    from kilolayer.layers.partial_sums_kernel import add_up

    x = x.contiguous()
    of_x, totals = torch.empty_like(x), _room_for_totals(statistics, gain, x if rectified else None)
    sums = _room_for_sums(totals)
    normalise_backward(gradient.contiguous(), _rows(x), gain, statistics, of_x, sums, rectified)
    add_up(sums, totals)
    return of_x, totals


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, x.shape[-1])


def _room_for_statistics(x: Tensor, dtype: torch.dtype, centred: bool) -> Tensor:
    return x.new_empty(2 if centred else 1, x.numel() // x.shape[-1], dtype=dtype)


def _room_for_totals(statistics: Tensor, gain: Tensor, shift: Tensor | None, learned: bool = False) -> list[Tensor]:
    """Of gain, LayerNorm's bias, a shift of the dtype of that given, and a learned factor."""
    dtypes = [gain.dtype] * statistics.shape[0] + ([] if shift is None else [shift.dtype]) + [gain.dtype] * learned
    return [gain.new_empty(gain.shape, dtype=dtype) for dtype in dtypes]


def _room_for_sums(totals: list[Tensor]) -> Tensor:
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
) -> tuple[Tensor, Tensor, Tensor]:
    precise, statistics = _normalised(_added(x, y, shift, omega, skip, branch), gain, bias, eps)
    return precise, precise.to(y.dtype, copy=True), statistics


@residual_norm_backward.register_kernel("cpu")
def _(
    of_precise: Tensor | None,
    of_rounded: Tensor | None,
    x: Tensor,
    y: Tensor,
    shift: Tensor | None,
    omega: Tensor | None,
    skip: float,
    branch: float,
    gain: Tensor,
    statistics: Tensor,
    learned: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    gradient = sum(each.to(x.dtype) for each in (of_precise, of_rounded) if each is not None)
    assert isinstance(gradient, Tensor)
    of_added, totals = _of_normalised(gradient, _added(x, y, shift, omega, skip, branch), gain, statistics)
    of_x, of_y, others = _of_terms(of_added, x if learned else None, shift, omega, skip, branch, y.dtype)
    return of_x, of_y, totals + others


@sum_and_norm.register_kernel("cpu")
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
) -> tuple[Tensor, Tensor, Tensor]:
    added = _added(x, y, shift, omega, skip, branch)
    normed, statistics = _normalised(added, gain, bias, eps)
    return added, normed.to(y.dtype), statistics


@sum_and_norm_backward.register_kernel("cpu")
def _(
    of_added: Tensor | None,
    of_normed: Tensor | None,
    added: Tensor,
    x: Tensor | None,
    shift: Tensor | None,
    omega: Tensor | None,
    skip: float,
    branch: float,
    gain: Tensor,
    statistics: Tensor,
    rounded: torch.dtype,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    gradient = torch.zeros_like(added) if of_normed is None else of_normed.to(added.dtype)
    through_norm, totals = _of_normalised(gradient, added, gain, statistics)
    whole = through_norm if of_added is None else of_added + through_norm
    of_x, of_y, others = _of_terms(whole, x, shift, omega, skip, branch, rounded)
    return of_x, of_y, totals + others


@inner_norm.register_kernel("cpu")
def _(x: Tensor, gain: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    normed, statistics = _normalised(x.to(gain.dtype).contiguous(), gain, bias, eps)
    return normed.to(x.dtype), statistics


@inner_norm_backward.register_kernel("cpu")
def _(gradient: Tensor, x: Tensor, gain: Tensor, statistics: Tensor, rectified: bool) -> tuple[Tensor, list[Tensor]]:
    of_x, totals = _of_normalised(gradient.to(gain.dtype), x.to(gain.dtype), gain, statistics)
    if rectified:
        of_x = torch.where(x <= 0, 0.0, of_x)
        totals.append(of_x.flatten(0, -2).sum(dim=0).to(x.dtype))
    return of_x.to(x.dtype).contiguous(), totals


def _added(x: Tensor, y: Tensor, shift: Tensor | None, omega: Tensor | None, skip: float, branch: float) -> Tensor:
    """skip * omega * x + branch * (y + shift)."""
    y = y.to(x.dtype)
    added = (skip if omega is None else skip * omega) * x + branch * (y if shift is None else y + shift.to(x.dtype))
    return added.contiguous()


def _of_terms(
    of_added: Tensor,
    x: Tensor | None,
    shift: Tensor | None,
    omega: Tensor | None,
    skip: float,
    branch: float,
    rounded: torch.dtype,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The gradients of x, of y in `rounded`, and those of the shift where there is one and, where x is given, of omega."""
    others = [] if shift is None else [(branch * of_added.flatten(0, -2).sum(dim=0)).to(shift.dtype)]
    if x is not None:
        others.append(skip * (of_added * x).flatten(0, -2).sum(dim=0))
    factor = skip if omega is None else skip * omega
    return (factor * of_added).contiguous(), (branch * of_added).to(rounded, copy=True).contiguous(), others


def _normalised(x: Tensor, gain: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """N(x), and the statistics of its rows."""
    means = [] if bias is None else [x.mean(dim=-1, keepdim=True)]
    centred = x - means[0] if means else x
    inverse = (centred.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    normed = centred * inverse * gain
    return normed if bias is None else normed + bias, torch.stack([*means, inverse]).flatten(1)


def _of_normalised(gradient: Tensor, x: Tensor, gain: Tensor, statistics: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The gradient of x from that of N(x), and those of gain and, for LayerNorm, bias."""
    *means, inverse = statistics.view(-1, *x.shape[:-1], 1)
    standard = (x - means[0] if means else x) * inverse
    weighted = gradient * gain
    of_x = weighted - standard * (weighted * standard).mean(dim=-1, keepdim=True)
    of_x = of_x - weighted.mean(dim=-1, keepdim=True) if means else of_x
    totals = [(gradient * standard).flatten(0, -2).sum(dim=0)] + [gradient.flatten(0, -2).sum(dim=0) for _ in means]
    return of_x * inverse, totals


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
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(x), _like(y), _room_for_statistics(x, x.dtype, bias is not None)


@residual_norm_backward.register_fake
def _(
    of_precise: Tensor | None,
    of_rounded: Tensor | None,
    x: Tensor,
    y: Tensor,
    shift: Tensor | None,
    omega: Tensor | None,
    skip: float,
    branch: float,
    gain: Tensor,
    statistics: Tensor,
    learned: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    return _like(x), _like(y), _room_for_totals(statistics, gain, shift, learned)


@sum_and_norm.register_fake
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
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(x), _like(y), _room_for_statistics(x, x.dtype, bias is not None)


@sum_and_norm_backward.register_fake
def _(
    of_added: Tensor | None,
    of_normed: Tensor | None,
    added: Tensor,
    x: Tensor | None,
    shift: Tensor | None,
    omega: Tensor | None,
    skip: float,
    branch: float,
    gain: Tensor,
    statistics: Tensor,
    rounded: torch.dtype,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    return _like(added), _like(added, rounded), _room_for_totals(statistics, gain, shift, x is not None)


@inner_norm.register_fake
def _(x: Tensor, gain: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return _like(x), _room_for_statistics(x, gain.dtype, bias is not None)


@inner_norm_backward.register_fake
def _(gradient: Tensor, x: Tensor, gain: Tensor, statistics: Tensor, rectified: bool) -> tuple[Tensor, list[Tensor]]:
    return _like(x), _room_for_totals(statistics, gain, x if rectified else None)


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _keep_residual(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, y, shift, omega, ctx.skip, ctx.branch, gain, _, _ = inputs
    ctx.save_for_backward(x, y, shift, omega, gain, output[2])
    ctx.set_materialize_grads(False)  # an output that nobody reads has no gradient, and none is read


def _residual_backward(
    ctx: Any, of_precise: Tensor | None, of_rounded: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    x, y, shift, omega, gain, statistics = ctx.saved_tensors
    learned = ctx.needs_input_grad[3]
    of_x, of_y, totals = residual_norm_backward(
        of_precise, of_rounded, x, y, shift, omega, ctx.skip, ctx.branch, gain, statistics, learned
    )
    return _in_the_order_of_inputs(of_x, of_y, totals, statistics.shape[0] == 2, shift is not None, learned)


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, y, shift, omega, ctx.skip, ctx.branch, gain, _, _ = inputs
    added, _, statistics = output
    ctx.rounded = y.dtype
    # The sum is the next residual and kept anyway; x is needed for the gradient of omega alone, y for none.
    ctx.save_for_backward(added, x if ctx.needs_input_grad[3] else None, shift, omega, gain, statistics)
    ctx.set_materialize_grads(False)


def _sum_backward(ctx: Any, of_added: Tensor | None, of_normed: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    added, x, shift, omega, gain, statistics = ctx.saved_tensors
    of_x, of_y, totals = sum_and_norm_backward(
        of_added, of_normed, added, x, shift, omega, ctx.skip, ctx.branch, gain, statistics, ctx.rounded
    )
    return _in_the_order_of_inputs(of_x, of_y, totals, statistics.shape[0] == 2, shift is not None, x is not None)


def _in_the_order_of_inputs(
    of_x: Tensor, of_y: Tensor, totals: list[Tensor], centred: bool, shifted: bool, learned: bool
) -> tuple[Tensor | None, ...]:
    rest = iter(totals)
    of_gain = next(rest)
    of_bias = next(rest) if centred else None
    of_shift = next(rest) if shifted else None
    of_omega = next(rest) if learned else None
    return of_x, of_y, of_shift, of_omega, None, None, of_gain, of_bias, None


def _keep_inner(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, gain, _, _ = inputs
    ctx.save_for_backward(x, gain, output[1])
    ctx.set_materialize_grads(False)


def _inner_backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, gain, statistics = ctx.saved_tensors
    of_x, (of_gain, *of_bias) = inner_norm_backward(gradient, x, gain, statistics, False)
    return of_x, of_gain, of_bias[0] if of_bias else None, None


residual_norm.register_autograd(_residual_backward, setup_context=_keep_residual)
sum_and_norm.register_autograd(_sum_backward, setup_context=_keep_sum)
inner_norm.register_autograd(_inner_backward, setup_context=_keep_inner)
