"""Where a model is put, and in which dtype: checked before anything is read."""

from __future__ import annotations

from typing import Any

import torch

from kilolayer.errors import OptionError, shown

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_place(device: Any) -> torch.device:
    """The device that is named; one that this machine does not have is refused."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise OptionError(f"device is {shown(device)}", fix='allowed: "cpu", "cuda", "cuda:1", ...') from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise OptionError("there is no CUDA device", where="device", fix='use "cpu"')
    return found


def check_dtype(dtype: Any) -> None:
    """Refuse what weights cannot be held in: the name of a dtype, whole numbers, 8 bits."""
    if not isinstance(dtype, torch.dtype):
        raise OptionError(f"dtype is {shown(dtype)}", fix="give a torch dtype, such as torch.bfloat16")
    if dtype not in DTYPES:
        raise OptionError(f"dtype is {dtype}", fix=f"allowed: {', '.join(map(str, DTYPES))}")
