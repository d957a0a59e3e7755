"""Matrix products in 8-bit integers on the CPU.

    y = s_x s_w (q_x q_w^T) + b,    q_w = round(w / s_w)

s_w is a number for each output, s_x one for all rows of a call, chosen by its least and greatest value.
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
    """What is missing for such products; None where nothing is."""
    if torch.backends.quantized.engine == "none":
        return "this build of PyTorch has no engine for 8-bit integers"
    try:
        _pack(torch.eye(8), None)
    except RuntimeError as error:
        return f"PyTorch's engine for 8-bit integers does not run on this processor: {error}"
    return None


class Int8Product:
    """x W^T + b in fp32, the products between integers: [rows, inputs] to [rows, outputs]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed, self.reduce_range = _pack(weight, bias), _saturates()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic.default(x, self.packed, self.reduce_range)


def _pack(weight: Tensor, bias: Tensor | None) -> Any:
    greatest = weight.abs().amax(dim=1).double()
    scale = (greatest / LARGEST).where(greatest > 0, 1.0)
    with warnings.catch_warnings():
        # All releases that we allow have this way to the integer kernels; from 2.13 on they warn that a later one will not.
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions", category=UserWarning)
        integers = torch.quantize_per_channel(weight, scale, torch.zeros(len(weight), dtype=torch.int64), 0, torch.qint8)
    return torch.ops.quantized.linear_prepack(integers, bias)


@cache
def _saturates() -> bool:
    """Whether this processor adds pairs of products in 16 bits: then the rows must have 7 bits, or sums are cut."""
    x, weight = torch.full((1, 64), 255.0), torch.full((64, 64), float(LARGEST))
    found = torch.ops.quantized.linear_dynamic.default(x, _pack(weight, None), False)
    return not torch.allclose(found, x @ weight.T)
