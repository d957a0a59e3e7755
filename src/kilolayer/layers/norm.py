"""Norms and their absence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kilolayer.layers.options import LayerOptions


class LayerNorm(nn.LayerNorm):
    """Computes in the dtype of its weights, also where it stands inside a sublayer that computes in less."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, the name in torch
        return super().forward(input.to(self.weight.dtype))


class RMSNorm(nn.RMSNorm):
    """As LayerNorm, without mean and bias."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def make_norm(
    present: bool, size: int, options: LayerOptions, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> nn.Module:
    """A norm over the last axis, of `size`; the identity where the recipe has none."""
    if not present:
        return nn.Identity()
    kind = LayerNorm if options.norm == "layer" else RMSNorm
    return kind(size, eps=options.norm_eps, device=device, dtype=dtype)
