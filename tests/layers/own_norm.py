"""A norm as a user would write it, in a file of their own: x / mean |x|."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kilolayer.layers.norms.base import Norm


class MeanNorm(Norm):
    """weight * x / (mean of |x| + eps)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def reset_parameters(self) -> None:
        self.weight.fill_(1.0)

    @staticmethod
    def normalize(x: Tensor, eps: float) -> Tensor:
        return x / (x.abs().mean(dim=-1, keepdim=True) + eps)

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * self.normalize(x.to(self.weight.dtype), self.eps)).to(x.dtype)


class Tanh(Norm):
    """weight * tanh(alpha x), which is no norm of the form weight * normalize(x) + bias."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight, self.alpha = nn.Parameter(torch.ones(size)), nn.Parameter(torch.ones(()))

    def reset_parameters(self) -> None:
        self.weight.fill_(1.0)
        self.alpha.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * torch.tanh(self.alpha * x.to(self.weight.dtype))).to(x.dtype)
