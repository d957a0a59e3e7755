"""The scales and shifts of the residual equation: constants, and learned scalars and vectors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kilolayer.layers.initialize import KeyedGenerator
from kilolayer.recipes.base import Learned, PerLayer, Scale


class Constant(nn.Module):
    """value * x, with a fixed number that is the same for all layers of a stack."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return self.value * x

    def extra_repr(self) -> str:
        return f"{self.value:.4f}"


class LayerConstant(nn.Module):
    """value * x, with a fixed number that differs from layer to layer."""

    value: Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        self.init = value
        # A tensor, because one compiled layer serves all layers; a Python number would be compiled in as a constant.
        self.register_buffer("value", torch.empty(()), persistent=False)

    def reset_parameters(self, generator: KeyedGenerator | None = None) -> None:
        self.value.fill_(self.init)

    def forward(self, x: Tensor) -> Tensor:
        return self.value * x

    def extra_repr(self) -> str:
        return f"{self.init:.4f}"


class LearnedScale(nn.Module):
    """weight * x, with a scalar [] or a vector [size] for the last axis: a parameter, or a buffer if it is not trained."""

    weight: Tensor

    def __init__(self, scale: Learned, size: int) -> None:
        super().__init__()
        self.init, self.rate = scale.init, scale.rate
        shape = () if scale.shape == "scalar" else (size,)
        weight = torch.empty(shape)
        if scale.trainable:
            self.weight = nn.Parameter(weight)
        else:
            self.register_buffer("weight", weight)

    def reset_parameters(self, generator: KeyedGenerator | None = None) -> None:
        self.weight.fill_(self.init)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class HeadScale(nn.Module):
    """g_h * head_h: one learned factor per head, initialized to 1. [batch, heads, length, head_dim] to the same shape."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, 1, 1))

    def reset_parameters(self, generator: KeyedGenerator | None = None) -> None:
        self.weight.fill_(1.0)

    def forward(self, x_BHLD: Tensor) -> Tensor:
        return self.weight * x_BHLD


class Shift(nn.Module):
    """x + b, with one learned number b, initialized to 0."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(()))

    def reset_parameters(self, generator: KeyedGenerator | None = None) -> None:
        self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def make_scale(scale: Scale, size: int) -> nn.Module:
    """Build the module for a scale of a plan; the identity if it is the constant 1. size: length of a vector scale."""
    if isinstance(scale, Learned):
        return LearnedScale(scale, size)
    if isinstance(scale, PerLayer):
        return LayerConstant(scale.value)
    return nn.Identity() if scale == 1.0 else Constant(scale)


def factor_of(scale: nn.Module) -> float | Tensor:
    """The factor that a module built by `make_scale` multiplies by."""
    match scale:
        case Constant() | LayerConstant():
            return scale.value
        case LearnedScale():
            return scale.weight
        case _:
            return 1.0


def make_shift(present: bool) -> nn.Module:
    """A shift, or the identity if `present` is False."""
    return Shift() if present else nn.Identity()
