"""Checks whether Triton kernels and compiled layers can be built on this machine."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch

from kilolayer.errors import unknown

Name = Literal[
    "residual_norm",
    "inner_norm",
    "grouped_norm",
    "short_attention",
    "step_attention",
    "relu_product",
    "relu_network",
    "group_sums",
    "few_rows",
    "loss",
    "best_tokens",
]
NAMES: tuple[Name, ...] = get_args(Name)
"""Every kernel, or group of kernels, that can be left out alone; a recorded step cannot do without that of the update."""

_assumed: str | None = None
_left_out: tuple[str, ...] = ()


@functools.cache
def why_no_kernels() -> str | None:
    """What is missing for Triton; None where nothing is."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not os.environ.get("CC") and not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        return "Triton finds no C compiler"
    return None


def runs_on(device: torch.device, name: Name) -> bool:
    """Whether the kernel of this name runs on this device."""
    return available_on(device) and name not in _left_out


def available_on(device: torch.device) -> bool:
    """Whether kernels of our own run on this device at all."""
    return (device.type == "cuda" and _can_be_built()) or device.type == _assumed


@contextmanager
def assumed(device: str = "meta") -> Iterator[None]:
    """Inside, tensors of this type of device stand for those of a GPU that runs the kernels.

    Those without memory, as a plan needs it; those of the CPU run the operators' plain formulas, as tests need it.
    """
    global _assumed
    before, _assumed = _assumed, device
    try:
        yield
    finally:
        _assumed = before


@contextmanager
def disabled(*names: str) -> Iterator[None]:
    """Inside, the kernels of these names do not run, and what they compute is computed without them: for measurements.

    Code that is compiled inside is compiled without them, and again where it is called outside.
    """
    global _left_out
    for name in names:
        if name not in NAMES:
            raise unknown(name, NAMES, kind="kernel")
    before, _left_out = _left_out, (*_left_out, *names)
    try:
        yield
    finally:
        _left_out = before


def _can_be_built() -> bool:
    return why_no_kernels() is None


def assume_constant_when_compiled() -> None:
    """A compiled layer asks too, and the compiler would otherwise follow the search through the machine.

    To be called before anything is compiled, and not earlier: it imports the compiler, which takes as long as torch itself.
    """
    torch.compiler.assume_constant_result(_can_be_built)
