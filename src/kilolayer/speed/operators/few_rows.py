"""fp32 matrix products with few rows on a GPU, as in a decoding step.

cuBLAS computes them without tensor cores, in tiles made for large products. Here tensor cores are used: each fp32 number is
split into two TF32 numbers of 11 bits, and of their four products the three largest are summed in fp32, the small ones first.
The error is that of a plain fp32 sum (tests allow twice as much). Tiles are small and long sums are split, so that the whole
GPU is used. On the CPU the function is `F.linear`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.speed.operators import kernels

MOST_ROWS = 512
MULTIPLE = 64
"""The number of inputs must be a multiple of this, the step of the kernel's sum."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: [..., inputs] to [..., outputs]; weight [outputs, inputs]; bias [outputs]. Uses the kernel if it can run."""
    return few_rows_product(x, weight, bias) if can_run_few_rows(x, weight) else F.linear(x, weight, bias)


def can_run_few_rows(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel supports this product: few rows, and no gradient needed."""
    if torch.is_grad_enabled() or weight.dtype != torch.float32 or not kernels.runs_on(x.device, "few_rows"):
        return False
    inputs = weight.shape[1]
    return 0 < x.numel() <= MOST_ROWS * inputs and inputs % MULTIPLE == 0 and weight.is_contiguous()


def few_rows_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b: [..., inputs] to [..., outputs]; weight [outputs, inputs], contiguous; bias [outputs]."""
    if x.device.type == "cpu":
        return F.linear(x, weight, bias)
    from kilolayer.speed.operators.few_rows_kernel import multiply

    out = x.new_empty(*x.shape[:-1], len(weight))
    multiply(x.reshape(-1, x.shape[-1]).contiguous(), weight, bias, out.view(-1, len(weight)))
    return out
