"""Norms and their absence."""

from __future__ import annotations

import torch
from torch import nn

from kilolayer.layers.options import LayerOptions


def make_norm(
    present: bool, size: int, options: LayerOptions, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> nn.Module:
    """A norm over the last axis, of `size`; the identity where the recipe has none."""
    if not present:
        return nn.Identity()
    kind = nn.LayerNorm if options.norm == "layer" else nn.RMSNorm
    return kind(size, eps=options.norm_eps, device=device, dtype=dtype)
