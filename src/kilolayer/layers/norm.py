"""Norms and their absence."""

from __future__ import annotations

from torch import Tensor, nn

from kilolayer.layers.options import LayerOptions


class LayerNorm(nn.LayerNorm):
    """Computes in the dtype of its weights, also inside a sublayer that computes in less; returns its input's dtype."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, the name in torch
        return super().forward(input.to(self.weight.dtype)).to(input.dtype)


class RMSNorm(nn.RMSNorm):
    """As LayerNorm, without mean and bias."""

    eps: float  # pyright: ignore[reportIncompatibleVariableOverride], make_norm gives one
    bias = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


def make_norm(present: bool, size: int, options: LayerOptions) -> nn.Module:
    """A norm over the last axis, of `size`; the identity where the recipe has none."""
    if not present:
        return nn.Identity()
    return (LayerNorm if options.norm == "layer" else RMSNorm)(size, eps=options.norm_eps)
