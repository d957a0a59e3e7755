"""The feed-forward network's first product on a GPU: relu(x W^T + b) as one product, and a backward that passes over it once.

cuBLAS applies bias and ReLU where it writes the product. The output alone tells where the gradient passes, so neither the sums
before the ReLU nor a mask is kept. On the CPU the operators run plain formulas, which the kernels are tested against.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.layers import kernels

BLOCK_ROWS = 32
"""Rows that one partial sum of the bias's gradient covers."""


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products in this dtype can be fused with their ReLU here."""
    return dtype in (torch.bfloat16, torch.float16) and kernels.run_on(device)


@torch.library.custom_op("kilolayer::relu_product", mutates_args=(), device_types="cuda")
def relu_product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """relu(x W^T + b): [..., inputs] to [..., outputs]; weight [outputs, inputs]; bias [outputs]."""
    hidden = torch.ops.aten._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t())
    return hidden.view(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("kilolayer::relu_backward", mutates_args=(), device_types="cuda")
def relu_backward(gradient: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient where the ReLU let through, and its sum over rows, that of the bias.

    gradient and hidden [rows, columns], contiguous; the sum [columns].
    """
    from kilolayer.layers.partial_sums_kernel import add_up
    from kilolayer.layers.relu_product_kernel import pass_gradient

    rows, columns = gradient.shape
    passed, total = torch.empty_like(gradient), gradient.new_empty(columns)
    sums = gradient.new_empty(-(-rows // BLOCK_ROWS), 1, columns, dtype=torch.float32)
    pass_gradient(gradient, hidden, passed, sums, BLOCK_ROWS)
    add_up(sums, [total])
    return passed, total


@relu_product.register_kernel("cpu")
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias).relu()


@relu_backward.register_kernel("cpu")
def _(gradient: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    passed = torch.where(hidden <= 0, 0.0, gradient)
    return passed, passed.sum(dim=0, dtype=torch.float32).to(gradient.dtype)


@relu_product.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@relu_backward.register_fake
def _(gradient: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gradient), gradient.new_empty(gradient.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, hidden = ctx.saved_tensors
    rows = (-1, weight.shape[0])
    passed, of_bias = relu_backward(gradient.reshape(rows).contiguous(), hidden.view(rows))
    return (passed @ weight).view(x.shape), passed.t() @ x.reshape(-1, x.shape[-1]), of_bias


relu_product.register_autograd(_backward, setup_context=_keep)
