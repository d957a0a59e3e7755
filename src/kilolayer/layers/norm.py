"""Norms and their absence."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor, nn

from kilolayer.layers.options import LayerOptions
from kilolayer.operators.fused_norm import can_fuse_inner_norm, inner_norm


class LayerNorm(nn.LayerNorm):
    """Computes in the dtype of its weights, also inside a sublayer that computes in less; returns its input's dtype."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, the name in torch
        if is_fused(self, input.device, input.dtype):
            return inner_norm(input, self.weight, self.bias, self.eps)[0]
        return super().forward(input.to(self.weight.dtype)).to(input.dtype)


class RMSNorm(nn.RMSNorm):
    """As LayerNorm, without mean and bias."""

    eps: float  # pyright: ignore[reportIncompatibleVariableOverride], make_norm gives one
    bias = None

    def forward(self, x: Tensor) -> Tensor:
        if is_fused(self, x.device, x.dtype):
            return inner_norm(x, self.weight, self.bias, self.eps)[0]
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


def is_fused(norm: nn.Module | None, device: torch.device, dtype: torch.dtype) -> TypeGuard[LayerNorm | RMSNorm]:
    """Whether this is a norm, and fused_norm.py serves it beside products in `dtype`."""
    return isinstance(norm, LayerNorm | RMSNorm) and can_fuse_inner_norm(device, norm.weight.dtype, dtype, norm.weight.shape[0])


def make_norm(
    present: bool, size: int, options: LayerOptions, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> nn.Module:
    """A norm over the last axis, of `size`; the identity where the recipe has none."""
    if not present:
        return nn.Identity()
    kind = LayerNorm if options.norm == "layer" else RMSNorm
    return kind(size, eps=options.norm_eps, device=device, dtype=dtype)
