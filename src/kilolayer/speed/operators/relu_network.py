"""The feed-forward network with ReLU in half precision on a GPU, as one autograd function.

In the backward pass, the product that computes the gradient of the hidden states also applies the mask of the ReLU and sums
over the rows for the gradient of the bias, so that no separate pass is needed. It saves the same tensors as two products and a
ReLU. On the CPU the operator runs a plain formula, which the kernel is tested against.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kilolayer.speed.operators import kernels
from kilolayer.speed.operators.random_bits import draw_of
from kilolayer.speed.operators.relu_product import rectified_product, relu_backward, sum_of_rows

GENERATIONS = (9, 10)
"""Supported major compute capabilities: older GPUs cannot copy whole tiles, and graphics GPUs have too little shared memory."""
ALIGNMENT = 16
"""Alignment in bytes that such copies require of every row."""


def relu_network(
    x: Tensor,
    first: Tensor,
    bias: Tensor,
    second: Tensor,
    last_bias: Tensor | None,
    seed: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute W_2 drop(relu(W_1 x + b_1)) + b_2, [..., dim] to the same shape.

    first: W_1 [width, dim]. bias: b_1 [width]. second: W_2 [dim, width]. last_bias: b_2 [dim]. seed: int64 [1], for the dropout
    of random_bits.py; None: no dropout.
    """
    return _ReluNetwork.apply(x, first, bias, second, last_bias, seed, dropout)


class _ReluNetwork(torch.autograd.Function):
    # Not a custom operator, so that selective recomputation sees the second product and may save its result.

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        first: Tensor,
        bias: Tensor,
        second: Tensor,
        last_bias: Tensor | None,
        seed: Tensor | None,
        dropout: float,
    ) -> Tensor:
        hidden = rectified_product(x.reshape(-1, x.shape[-1]), first, bias, seed, dropout)
        ctx.scale = draw_of(seed, dropout).scale
        ctx.save_for_backward(x, first, second, hidden)
        return F.linear(hidden, second, last_bias).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, first, second, hidden = ctx.saved_tensors
        gradient, needs = grad_outputs[0].reshape(-1, x.shape[-1]), ctx.needs_input_grad
        passed, of_bias = masked_product(gradient, second, hidden, ctx.scale)
        of_x = (passed @ first).view(x.shape) if needs[0] else None
        of_first = passed.t() @ x.reshape(gradient.shape) if needs[1] else None
        of_second = gradient.t() @ hidden if needs[3] else None
        return of_x, of_first, of_bias, of_second, gradient.sum(dim=0) if needs[4] else None, None, None


@torch.library.custom_op("kilolayer::masked_product", mutates_args=(), device_types="cuda")
def masked_product(gradient: Tensor, weight: Tensor, hidden: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the gradient of the ReLU's input, scale * gradient W where hidden > 0 and 0 elsewhere, and its sum over rows.

    gradient: [rows, dim]. weight: W [dim, width]. hidden: [rows, width], the output of ReLU and dropout. scale: the factor of
    dropout for elements that it keeps. Returns [rows, width] and [width]. All tensors are in half precision.
    """
    gradient, weight, hidden = gradient.contiguous(), weight.contiguous(), hidden.contiguous()
    if not (kernels.runs_on(hidden.device, "relu_network") and _supports_tile_copies(gradient, weight, hidden)):
        return relu_backward(gradient @ weight, hidden, scale)
    from kilolayer.speed.operators.masked_product_kernel import BLOCK_ROWS, multiply_and_mask
    from kilolayer.speed.operators.partial_sums_kernel import add_up

    rows, width = hidden.shape
    passed, total = _empty_outputs(hidden)
    sums = hidden.new_empty(-(-rows // BLOCK_ROWS), 1, width, dtype=torch.float32)
    multiply_and_mask(gradient, weight, hidden, passed, sums, scale)
    add_up(sums, [total])
    return passed, total


def _supports_tile_copies(*given: Tensor) -> bool:
    """Whether this GPU can copy tiles of these matrices: each row must be aligned, which the rows of a view may not be."""
    begins = [bytes_to for each in given for bytes_to in (each.data_ptr(), each.stride(0) * each.itemsize)]
    aligned = all(begin % ALIGNMENT == 0 for begin in begins)
    return aligned and given[0].numel() > 0 and torch.cuda.get_device_capability(given[0].device)[0] in GENERATIONS


def _empty_outputs(hidden: Tensor) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape[1])


@masked_product.register_kernel("cpu")
def _(gradient: Tensor, weight: Tensor, hidden: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    passed = torch.where(hidden <= 0, 0.0, scale * (gradient @ weight))
    return passed, sum_of_rows(passed)


@masked_product.register_fake
def _(gradient: Tensor, weight: Tensor, hidden: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    return _empty_outputs(hidden)
