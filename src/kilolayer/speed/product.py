"""Projections and norms through operators, on the modules of the plain layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kilolayer.layers.norm import LayerNorm, RMSNorm
from kilolayer.layers.projection import Projection
from kilolayer.operators.few_rows import linear
from kilolayer.operators.fused_norm import can_fuse_inner_norm, inner_norm


def project(projection: Projection, x: Tensor, *, biased: bool = True) -> Tensor:
    """[..., inputs] to [..., sum of rows]; with `biased=False` the bias is added by a kernel that follows."""
    return linear(x.to(projection.weight.dtype), projection.weight, projection.bias if biased else None)


def has_inner_norm_kernel(norm: nn.Module, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this is a norm that a kernel computes between products in `dtype`."""
    return isinstance(norm, LayerNorm | RMSNorm) and can_fuse_inner_norm(device, norm.weight.dtype, dtype, norm.weight.shape[0])


def normalise(norm: nn.Module, x: Tensor) -> Tensor:
    """N(x), in the dtype of x."""
    if has_inner_norm_kernel(norm, x.device, x.dtype):
        assert isinstance(norm, LayerNorm | RMSNorm)
        return inner_norm(x, norm.weight, norm.bias, norm.eps)[0]
    return norm(x)


def chance_of(dropout: nn.Module) -> float:
    """With which an element is dropped now."""
    return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
