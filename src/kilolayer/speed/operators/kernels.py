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
"""Every kernel, or group of kernels, that can be disabled; a recorded step always needs the update kernel."""

_assumed: str | None = None
_left_out: tuple[str, ...] = ()


@functools.cache
def why_no_kernels() -> str | None:
    """What Triton lacks on this machine; None if nothing."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not os.environ.get("CC") and not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        return "Triton finds no C compiler"
    return None


def runs_on(device: torch.device, name: Name) -> bool:
    """Whether the kernel of this name runs on this device."""
    return available_on(device) and name not in _left_out


def available_on(device: torch.device) -> bool:
    """Whether any of our kernels can run on this device."""
    return (device.type == "cuda" and _can_be_built()) or device.type == _assumed


@contextmanager
def assumed(device: str = "meta") -> Iterator[None]:
    """A context in which tensors on this type of device are treated as if on a GPU that runs the kernels.

    Tensors on the meta device need no memory, for plans; those on the CPU run the operators' plain formulas, for tests.
    """
    global _assumed
    before, _assumed = _assumed, device
    try:
        yield
    finally:
        _assumed = before


@contextmanager
def disabled(*names: str) -> Iterator[None]:
    """A context in which these kernels are replaced by plain operations, for measurements.

    Code compiled inside does not use them, and is compiled again when it is called outside.
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
    """Keep the compiler from tracing the search for Triton and a C compiler, which compiled layers also call.

    Call it just before anything is compiled: it imports the compiler, which takes as long as torch itself.
    """
    torch.compiler.assume_constant_result(_can_be_built)
