"""LayerNorm and RMSNorm over the last axis, or the identity where a recipe has no norm."""

from __future__ import annotations

from torch import Tensor, nn

from kilolayer.layers.options import LayerOptions


class LayerNorm(nn.LayerNorm):
    """LayerNorm computed in the dtype of its weights, even if the input is in lower precision; returns the input's dtype."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, the name in torch
        return super().forward(input.to(self.weight.dtype)).to(input.dtype)


class RMSNorm(nn.RMSNorm):
    """RMSNorm with the same treatment of dtypes as LayerNorm above."""

    eps: float  # pyright: ignore[reportIncompatibleVariableOverride], make_norm always sets one
    bias = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


def make_norm(present: bool, size: int, options: LayerOptions) -> nn.Module:
    """A norm over a last axis of `size` elements, or the identity if `present` is False."""
    if not present:
        return nn.Identity()
    return (LayerNorm if options.norm == "layer" else RMSNorm)(size, eps=options.norm_eps)
