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


def why_not_int8() -> str | None:
    """What is missing for such products; None where nothing is."""
    return "this build of PyTorch has no engine for 8-bit integers on this processor" if _engine() is None else None


@cache
def _engine() -> str | None:
    """PyTorch's own choice where it works; on processors that are not x86 the default may be one that does not."""
    weight = torch.eye(8)
    for engine in dict.fromkeys([torch.backends.quantized.engine, "onednn"]):
        try:
            found = torch.ops.quantized.linear_dynamic.default(weight, _pack(weight, None, engine), False)
        except RuntimeError:
            continue
        if torch.allclose(found, weight, atol=0.02):
            return engine
    return None


class Int8Product:
    """x W^T + b in fp32, the products between integers: [rows, inputs] to [rows, outputs]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        engine = _engine()
        assert engine is not None
        self.packed, self.reduce_range = _pack(weight, bias, engine), _saturates(engine)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic.default(x, self.packed, self.reduce_range)


def _pack(weight: Tensor, bias: Tensor | None, engine: str) -> Any:
    greatest = weight.abs().amax(dim=1).double()
    scale = (greatest / LARGEST).where(greatest > 0, 1.0)
    with warnings.catch_warnings():
        # All releases that we allow have this way to the integer kernels; from 2.13 on they warn that a later one will not.
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions", category=UserWarning)
        integers = torch.quantize_per_channel(weight, scale, torch.zeros(len(weight), dtype=torch.int64), 0, torch.qint8)
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine
    try:
        return torch.ops.quantized.linear_prepack(integers, bias)
    finally:
        torch.backends.quantized.engine = before


@cache
def _saturates(engine: str) -> bool:
    """Whether this processor adds pairs of products in 16 bits: then the rows must have 7 bits, or sums are cut."""
    x, weight = torch.full((1, 64), 255.0), torch.full((64, 64), float(LARGEST))
    found = torch.ops.quantized.linear_dynamic.default(x, _pack(weight, None, engine), False)
    return not torch.allclose(found, x @ weight.T)
