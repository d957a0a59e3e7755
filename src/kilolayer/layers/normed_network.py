"""The feed-forward network with a ReLU and a norm behind it, in half precision on a GPU, as one unit.

With g = gradient W_2, the gradient of the norm's output n = gain * s + beta, that of the hidden states h is

    (gain * g - a - s * b) / deviation,    a = mean(gain * g),    b = mean(gain * g * s)    over a row's width.

Neither mean needs g: the sums are gradient . (W_2 gain) and gradient . (W_2 (gain * s)), and W_2 (gain * s) is the network's
output less W_2 beta and b_2. So the product that gives g goes back through norm and ReLU where it is written, and finds the
sums over rows for gain, beta and b_1 on the way: no pass over it remains. For that the output is kept, besides what products
and norm keep. On the CPU the operator runs the same formulas in plain operations.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.layers.fused_norm import inner_norm, inner_norm_backward, room_for_totals, room_like
from kilolayer.layers.relu_network import come_in_tiles
from kilolayer.layers.relu_product import relu_product


def normed_network(
    x: Tensor,
    first: Tensor,
    bias: Tensor,
    gain: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    second: Tensor,
    last_bias: Tensor | None,
) -> Tensor:
    """W_2 N(relu(W_1 x + b_1)) + b_2: [..., dim] to the same; W_1 [width, dim]; b_1 [width]; W_2 [dim, width]; b_2 [dim].

    gain and norm_bias [width]; without norm_bias the norm is RMSNorm.
    """
    return _NormedNetwork.apply(x, first, bias, gain, norm_bias, eps, second, last_bias)


class _NormedNetwork(torch.autograd.Function):
    # Not an operator itself: so the second product is one that recomputation knows, and may keep.

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        first: Tensor,
        bias: Tensor,
        gain: Tensor,
        norm_bias: Tensor | None,
        eps: float,
        second: Tensor,
        last_bias: Tensor | None,
    ) -> Tensor:
        hidden = relu_product(x.reshape(-1, x.shape[-1]), first, bias)
        normed, statistics = inner_norm(hidden, gain, norm_bias, eps)
        y = F.linear(normed, second, last_bias)
        ctx.save_for_backward(x, first, gain, norm_bias, second, last_bias, hidden, statistics, normed, y)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, first, gain, norm_bias, second, last_bias, hidden, statistics, normed, y = ctx.saved_tensors
        gradient = grad_outputs[0].reshape(y.shape)
        given = (gradient, second, hidden, gain, norm_bias, statistics, y, last_bias)
        passed, (of_gain, *of_norm_bias, of_bias) = normed_product_backward(*given)
        of_first, of_second = passed.t() @ x.reshape(y.shape), gradient.t() @ normed
        of_last_bias = None if last_bias is None else gradient.sum(dim=0)
        of_norm = of_gain, of_norm_bias[0] if of_norm_bias else None, None
        return (passed @ first).view(x.shape), of_first, of_bias, *of_norm, of_second, of_last_bias


@torch.library.custom_op("kilolayer::normed_product_backward", mutates_args=(), device_types="cuda")
def normed_product_backward(
    gradient: Tensor,
    weight: Tensor,
    hidden: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    statistics: Tensor,
    y: Tensor,
    last_bias: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    """The gradient of what the ReLU read, and those of gain, LayerNorm's bias, and the bias before the ReLU.

    gradient [rows, dim], that of y = N(hidden) W^T + last_bias; weight [dim, width]; hidden [rows, width], what the ReLU gave;
    gain and bias [width]; statistics as `inner_norm` gave them. Gain, bias and statistics in fp32, all else in half precision.
    """
    gradient, weight, hidden = gradient.contiguous(), weight.contiguous(), hidden.contiguous()
    if not come_in_tiles(gradient, weight, hidden):
        return inner_norm_backward(gradient @ weight, hidden, gain, statistics, True)
    from kilolayer.layers.masked_product_kernel import BLOCK_ROWS
    from kilolayer.layers.normed_product_kernel import find_coefficients, multiply_and_go_back, weigh
    from kilolayer.layers.partial_sums_kernel import add_up

    (rows, width), weighed_gain, offset = hidden.shape, None, last_bias
    if bias is not None:
        weighed = gain.new_empty(2, len(weight))
        weigh(weight, gain, bias, last_bias, weighed)
        weighed_gain, offset = weighed
    coefficients = torch.empty_like(statistics)
    find_coefficients(gradient, y.contiguous(), weighed_gain, offset, statistics, coefficients, width)
    passed, totals = room_like(hidden), room_for_totals(statistics, gain, hidden)
    sums = gain.new_empty(-(-rows // BLOCK_ROWS), len(totals), width)
    multiply_and_go_back(gradient, weight, hidden, gain, statistics, coefficients, passed, sums)
    add_up(sums, totals)
    return passed, totals


@normed_product_backward.register_kernel("cpu")
def _(
    gradient: Tensor,
    weight: Tensor,
    hidden: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    statistics: Tensor,
    y: Tensor,
    last_bias: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    exact, precise = gradient.to(gain.dtype), weight.to(gain.dtype)
    *means, inverse = statistics[:, :, None]
    standard = (hidden - means[0] if means else hidden) * inverse
    offset = sum(each for each in (None if bias is None else precise @ bias, last_bias) if each is not None)
    of_normed = exact @ precise
    of_hidden = gain * of_normed - standard * (exact * (y - offset)).sum(dim=1, keepdim=True) / len(gain)
    if means:
        of_hidden -= (exact @ (precise @ gain))[:, None] / len(gain)
    passed = torch.where(hidden <= 0, 0.0, of_hidden * inverse)
    terms = [of_normed * standard, *(of_normed for _ in means), passed]
    totals = [term.sum(dim=0).to(room) for term, room in zip(terms, room_for_totals(statistics, gain, hidden), strict=True)]
    return passed.to(hidden.dtype), totals


@normed_product_backward.register_fake
def _(
    gradient: Tensor,
    weight: Tensor,
    hidden: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    statistics: Tensor,
    y: Tensor,
    last_bias: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    return room_like(hidden), room_for_totals(statistics, gain, hidden)
