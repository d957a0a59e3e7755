"""Checks of the device and the dtype of a model, made before anything is allocated or read."""

from __future__ import annotations

from typing import Any

import torch

from kilolayer.errors import OptionError, shown

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_device(device: Any) -> torch.device:
    """Return the device as a torch.device; raise if it is invalid, or if CUDA is not available."""
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise OptionError(f"device is {shown(device)}", fix='allowed: "cpu", "cuda", "cuda:1", ...') from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise OptionError("there is no CUDA device", where="device", fix='use "cpu"')
    return chosen


def check_dtype(dtype: Any) -> None:
    """Raise unless `dtype` is a torch dtype that weights can have: fp64, fp32, bf16 or fp16."""
    if not isinstance(dtype, torch.dtype):
        raise OptionError(f"dtype is {shown(dtype)}", fix="give a torch dtype, such as torch.bfloat16")
    if dtype not in DTYPES:
        raise OptionError(f"dtype is {dtype}", fix=f"allowed: {', '.join(map(str, DTYPES))}")
