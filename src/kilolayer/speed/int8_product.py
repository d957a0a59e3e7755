"""Matrix products in 8-bit integers on the CPU.

    y = s_x s_w (q_x q_w^T) + b,    q_w = round(w / s_w)

s_w has one value per output; s_x is one number per call, chosen from the minimum and maximum of x.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

LARGEST = 127


@cache
def why_not_int8() -> str | None:
    """Why int8 products cannot be used here; None if they can."""
    if torch.backends.quantized.engine == "none":
        return "this build of PyTorch has no engine for 8-bit integers"
    try:
        _pack(torch.eye(8), None)
    except RuntimeError as error:
        return f"PyTorch's engine for 8-bit integers does not run on this processor: {error}"
    return None


class Int8Product:
    """x W^T + b with fp32 input and output and int8 products: [rows, inputs] to [rows, outputs]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed, self.reduce_range = _pack(weight, bias), _saturates()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic.default(x, self.packed, self.reduce_range)


def _pack(weight: Tensor, bias: Tensor | None) -> Any:
    greatest = weight.abs().amax(dim=1).double()
    scale = (greatest / LARGEST).where(greatest > 0, 1.0)
    with warnings.catch_warnings():
        # Every supported torch release has this API; from 2.13 on it warns that it will be removed.
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions", category=UserWarning)
        integers = torch.quantize_per_channel(weight, scale, torch.zeros(len(weight), dtype=torch.int64), 0, torch.qint8)
    return torch.ops.quantized.linear_prepack(integers, bias)


@cache
def _saturates() -> bool:
    """Whether this CPU adds pairs of products in 16 bits; x must then be quantized to 7 bits, or sums would saturate."""
    x, weight = torch.full((1, 64), 255.0), torch.full((64, 64), float(LARGEST))
    found = torch.ops.quantized.linear_dynamic.default(x, _pack(weight, None), False)
    return not torch.allclose(found, x @ weight.T)
