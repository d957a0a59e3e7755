"""Products of few rows in fp32 on a GPU, as a step of decoding has them.

A library's tiles are made for large products: of 320 x 512 outputs they cover the GPU to a fifth. Here tiles are small, and all
of the GPU works. The arithmetic is that of fp32, without tensor cores. On the CPU the same function is `F.linear`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.layers import kernels

MOST_ROWS, MOST_INPUTS = 512, 1024
MULTIPLE = 64
"""Inputs and outputs come in whole tiles."""


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether this product, of which no gradient is asked, is one of few rows."""
    if torch.is_grad_enabled() or weight.dtype != torch.float32 or not kernels.run_on(x.device):
        return False
    outputs, inputs = weight.shape
    fits = x.numel() <= MOST_ROWS * inputs and inputs <= MOST_INPUTS and inputs % MULTIPLE == outputs % MULTIPLE == 0
    return fits and weight.is_contiguous()


def few_rows_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b: [..., inputs] to [..., outputs]; weight [outputs, inputs], contiguous; bias [outputs]."""
    if x.device.type == "cpu":
        return F.linear(x, weight, bias)
    from kilolayer.layers.few_rows_kernel import multiply

    out = x.new_empty(*x.shape[:-1], len(weight))
    multiply(x.reshape(-1, x.shape[-1]).contiguous(), weight, bias, out.view(-1, len(weight)))
    return out
