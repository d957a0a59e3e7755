"""Scales and shifts: fixed numbers, and values that live in the model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kilolayer.layers.initialise import Noise
from kilolayer.recipes.base import Learned, Scale


class Constant(nn.Module):
    """x times one number, the same for a whole stack."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return self.value * x

    def extra_repr(self) -> str:
        return f"{self.value:.4f}"


class LearnedScale(nn.Module):
    """x times a scalar or a vector: a parameter, or a buffer where it is not trained."""

    weight: Tensor

    def __init__(self, scale: Learned, size: int) -> None:
        super().__init__()
        self.start, self.rate = scale.start, scale.rate
        shape = () if scale.shape == "scalar" else (size,)
        weight = torch.empty(shape)
        if scale.trainable:
            self.weight = nn.Parameter(weight)
        else:
            self.register_buffer("weight", weight)

    def fill(self, noise: Noise) -> None:
        self.weight.fill_(self.start)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class HeadScale(nn.Module):
    """Attention's output times one learned factor a head, starting at 1."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, 1, 1))

    def fill(self, noise: Noise) -> None:
        self.weight.fill_(1.0)

    def forward(self, x_BHLD: Tensor) -> Tensor:
        return self.weight * x_BHLD


class Shift(nn.Module):
    """x plus one learned number, starting at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(()))

    def fill(self, noise: Noise) -> None:
        self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def make_scale(scale: Scale, size: int) -> nn.Module:
    """The module of a plan's scale; the identity where it is the number 1."""
    if isinstance(scale, Learned):
        return LearnedScale(scale, size)
    return nn.Identity() if scale == 1.0 else Constant(scale)


def factor_of(scale: nn.Module) -> float | Tensor:
    """What a module of `make_scale` multiplies by."""
    match scale:
        case Constant():
            return scale.value
        case LearnedScale():
            return scale.weight
        case _:
            return 1.0


def make_shift(present: bool) -> nn.Module:
    """A shift, or the identity where the recipe has none."""
    return Shift() if present else nn.Identity()
