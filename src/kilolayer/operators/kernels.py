"""Whether kernels of our own, and compiled layers, can be built on this machine."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_assumed = False


@functools.cache
def why_no_kernels() -> str | None:
    """What is missing for Triton; None where nothing is."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not os.environ.get("CC") and not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        return "Triton finds no C compiler"
    return None


def run_on(device: torch.device) -> bool:
    """Whether kernels of our own run on this device."""
    return (device.type == "cuda" and _can_be_built()) or (_assumed and device.type == "meta")


@contextmanager
def assumed() -> Iterator[None]:
    """Inside, tensors without memory stand for those of a GPU that runs the kernels, as a plan needs it."""
    global _assumed
    _assumed = True
    try:
        yield
    finally:
        _assumed = False


@torch.compiler.assume_constant_result
def _can_be_built() -> bool:
    # A compiled layer asks too, and the compiler would otherwise follow the search through the machine.
    return why_no_kernels() is None
