"""LayerNorm: weight * (x - mean) / sqrt(variance + eps) + bias."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from kilolayer.layers.norms.base import Norm
from kilolayer.layers.norms.registry import register_norm


@register_norm
class LayerNorm(nn.LayerNorm, Norm):
    """LayerNorm computed in the dtype of its weights, even if the input is in lower precision; returns the input's dtype."""

    name: ClassVar[str] = "layer"
    title: ClassVar[str] = "LayerNorm"
    has_bias: ClassVar[bool] = True
    is_homogeneous: ClassVar[bool] = True

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, the name in torch
        return super().forward(input.to(self.weight.dtype)).to(input.dtype)

    @staticmethod
    def normalize(x: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=eps)
