"""RMSNorm: weight * x / sqrt(mean of x^2 + eps)."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from kilolayer.layers.norms.base import Norm
from kilolayer.layers.norms.registry import register_norm


@register_norm
class RMSNorm(nn.RMSNorm, Norm):
    """RMSNorm computed in the dtype of its weights, even if the input is in lower precision; returns the input's dtype."""

    name: ClassVar[str] = "rms"
    title: ClassVar[str] = "RMSNorm"
    is_homogeneous: ClassVar[bool] = True
    eps: float  # pyright: ignore[reportIncompatibleVariableOverride], make_norm always sets one
    bias = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)

    @staticmethod
    def normalize(x: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=eps)
