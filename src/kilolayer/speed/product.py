"""Projections and norms by fused operators, on the modules of the plain layers."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor, nn

from kilolayer.layers.norms.layer import LayerNorm
from kilolayer.layers.norms.rms import RMSNorm
from kilolayer.layers.projection import Projection
from kilolayer.speed.operators.few_rows import linear
from kilolayer.speed.operators.fused_norm import can_fuse_inner_norm, inner_norm


def project(projection: Projection, x: Tensor, *, biased: bool = True) -> Tensor:
    """[..., inputs] to [..., sum of rows]; with `biased=False` without the bias, which a later kernel adds."""
    return linear(x.to(projection.weight.dtype), projection.weight, projection.bias if biased else None)


KernelNorm = LayerNorm | RMSNorm
KERNEL_NORMS = (LayerNorm, RMSNorm)
"""The norms that kernels compute. Others, which may extend these, are called as modules inside a fast layer."""


def is_kernel_norm(norm: nn.Module | None) -> TypeGuard[KernelNorm]:
    """Whether kernels know this norm."""
    return type(norm) in KERNEL_NORMS


def has_inner_norm_kernel(norm: nn.Module, device: torch.device, dtype: torch.dtype) -> TypeGuard[KernelNorm]:
    """Whether a kernel can compute this norm between products in `dtype`."""
    return is_kernel_norm(norm) and can_fuse_inner_norm(device, norm.weight.dtype, dtype, norm.weight.shape[0])


def normalize(norm: nn.Module, x: Tensor) -> Tensor:
    """N(x), in the dtype of x."""
    if has_inner_norm_kernel(norm, x.device, x.dtype):
        return inner_norm(x, norm.weight, norm.bias, norm.eps)[0]
    return norm(x)


def dropout_of(dropout: nn.Module) -> float:
    """The probability with which an element is currently dropped; 0 in evaluation mode."""
    return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
