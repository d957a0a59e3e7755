"""The feed-forward network's first product on a GPU: relu(x W^T + b) in one kernel, with a backward of one pass.

cuBLAS applies bias and ReLU in the epilogue of the product; dropout is one more pass over the result. The gradient passes where
the output is above 0, so that neither the input of the ReLU nor a dropout mask is saved, and the backward pass draws no random
numbers. If a norm follows, its backward and the ReLU's are one pass. On the CPU the operators run plain formulas, which the
kernels are tested against.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.speed.operators import kernels, random_bits
from kilolayer.speed.operators.fused_norm import inner_norm, inner_norm_backward
from kilolayer.speed.operators.random_bits import draw_of

BLOCK_ROWS = 32
"""Number of rows in one partial sum of the bias's gradient."""


def can_fuse_relu_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of this dtype can be fused with their ReLU on this device."""
    return dtype in (torch.bfloat16, torch.float16) and kernels.runs_on(device, "relu_product")


@torch.library.custom_op("kilolayer::relu_product", mutates_args=(), device_types="cuda")
def relu_product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute relu(x W^T + b), [..., inputs] to [..., outputs]. weight: W [outputs, inputs]. bias: b [outputs]."""
    return _rectified(x, weight, bias)


def _rectified(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    hidden = torch.ops.aten._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t())
    return hidden.view(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("kilolayer::relu_dropout_product", mutates_args=(), device_types="cuda")
def relu_dropout_product(x: Tensor, weight: Tensor, bias: Tensor, seed: Tensor, dropout: float) -> Tensor:
    """Compute drop(relu(x W^T + b)), with shapes as in `relu_product`. seed: int64 [1], for the dropout of random_bits.py."""
    from kilolayer.speed.operators.relu_product_kernel import drop_inplace

    hidden = _rectified(x, weight, bias)
    if dropout > 0:
        drop_inplace(hidden, draw_of(seed, dropout))
    return hidden


@torch.library.custom_op("kilolayer::normed_relu_product", mutates_args=())
def normed_relu_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    gain: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    seed: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return N(h) and h = drop(relu(x W^T + b)), [..., outputs] each, and the norm's statistics as `inner_norm` returns them.

    gain, norm_bias: of the norm, [outputs]. seed: int64 [1], as in `relu_dropout_product`; None: no dropout.
    """
    hidden = rectified_product(x, weight, bias, seed, dropout)
    normed, statistics = inner_norm(hidden, gain, norm_bias, eps)
    return normed, hidden, statistics


def rectified_product(x: Tensor, weight: Tensor, bias: Tensor, seed: Tensor | None, dropout: float) -> Tensor:
    """Compute relu(x W^T + b), [..., outputs], followed by dropout if there is a seed."""
    if seed is None or dropout == 0:
        return relu_product(x, weight, bias)
    return relu_dropout_product(x, weight, bias, seed, dropout)


@torch.library.custom_op("kilolayer::relu_backward", mutates_args=(), device_types="cuda")
def relu_backward(gradient: Tensor, hidden: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the gradient of the ReLU's input, scale * gradient where hidden > 0, and its sum over rows: that of the bias.

    gradient, hidden: [rows, columns], contiguous; hidden is the output of ReLU and dropout. scale: the factor of dropout for
    elements that it keeps. Returns [rows, columns] and [columns].
    """
    from kilolayer.speed.operators.partial_sums_kernel import add_up
    from kilolayer.speed.operators.relu_product_kernel import pass_gradient

    rows, columns = gradient.shape
    passed, total = torch.empty_like(gradient), gradient.new_empty(columns)
    sums = gradient.new_empty(-(-rows // BLOCK_ROWS), 1, columns, dtype=torch.float32)
    pass_gradient(gradient, hidden, passed, sums, BLOCK_ROWS, scale)
    add_up(sums, [total])
    return passed, total


@relu_product.register_kernel("cpu")
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias).relu()


@relu_dropout_product.register_kernel("cpu")
def _(x: Tensor, weight: Tensor, bias: Tensor, seed: Tensor, dropout: float) -> Tensor:
    return random_bits.dropout(F.linear(x, weight, bias).relu(), seed, dropout)


@relu_backward.register_kernel("cpu")
def _(gradient: Tensor, hidden: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    passed = torch.where(hidden <= 0, 0.0, scale * gradient)
    return passed, sum_of_rows(passed)


def sum_of_rows(x: Tensor) -> Tensor:
    """Sum over rows, [rows, columns] to [columns], in fp32 or higher precision."""
    return x.sum(dim=0, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


@relu_product.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@relu_dropout_product.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, seed: Tensor, dropout: float) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@normed_relu_product.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    gain: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    seed: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    hidden = relu_product(x, weight, bias)
    normed, statistics = inner_norm(hidden, gain, norm_bias, eps)
    return normed, hidden, statistics


@relu_backward.register_fake
def _(gradient: Tensor, hidden: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gradient), gradient.new_empty(gradient.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    x, weight, _ = inputs
    ctx.scale = 1.0
    ctx.save_for_backward(x, weight, output)


def _setup_dropout_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, seed, dropout = inputs
    ctx.scale = draw_of(seed, dropout).scale
    ctx.save_for_backward(x, weight, output)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, hidden = ctx.saved_tensors
    rows = (-1, weight.shape[0])
    passed, of_bias = relu_backward(gradient.reshape(rows).contiguous(), hidden.view(rows), ctx.scale)
    return *_of_factors(passed, x, weight), of_bias


def _dropped_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(ctx, gradient), None, None


def _setup_norm_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, _, gain, _, _, seed, dropout = inputs
    ctx.scale = draw_of(seed, dropout).scale
    ctx.save_for_backward(x, weight, gain, *output[1:])
    ctx.set_materialize_grads(False)


def _normed_backward(ctx: Any, gradient: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    x, weight, gain, hidden, statistics = ctx.saved_tensors
    passed, (of_gain, *of_norm_bias, of_bias) = inner_norm_backward(gradient, hidden, gain, statistics, True, ctx.scale)
    of_x, of_weight = _of_factors(passed.view(-1, weight.shape[0]), x, weight)
    return of_x, of_weight, of_bias, of_gain, of_norm_bias[0] if of_norm_bias else None, None, None, None


def _of_factors(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and W, given that of x W^T: [rows, outputs]."""
    return (gradient @ weight).view(x.shape), gradient.t() @ x.reshape(-1, x.shape[-1])


relu_product.register_autograd(_backward, setup_context=_setup_context)
relu_dropout_product.register_autograd(_dropped_backward, setup_context=_setup_dropout_context)
normed_relu_product.register_autograd(_normed_backward, setup_context=_setup_norm_context)
