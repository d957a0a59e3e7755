"""Convolutions over maps [batch, channels, rows, columns], and the norm between them."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from kilolayer.layers.initialize import KeyedGenerator

GROUPS, LEAST_CHANNELS = 32, 4
"""The groups of GroupNorm in its paper (Wu and He 2018). With fewer channels there are fewer groups: a group of one channel
would leave nothing of a map of one position."""


class Convolution(nn.Conv2d):
    """A convolution that keeps the size of a map, with weights from N(0, 2 / fan_in) (He et al. 2015) and biases at 0."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__(inputs, outputs, kernel, padding=kernel // 2)
        self.std = math.sqrt(2 / (inputs * kernel**2))

    def reset_parameters(self, generator: KeyedGenerator | None = None) -> None:
        if hasattr(self, "std"):  # nn.Conv2d calls this before it is known how the weights start
            _reset(self, self.std, generator or KeyedGenerator())

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, the name in torch
        """[batch, inputs, rows, columns] to [batch, outputs, rows, columns], in the dtype of the weights."""
        return super().forward(input.to(self.weight.dtype))


class PreciseConvolution(Convolution):
    """A convolution that keeps its dtype when `Model.cast_weights` reduces the precision of a model."""


class Doubling(nn.ConvTranspose2d):
    """A transposed convolution that doubles the size of a map: each input gives 2 x 2 outputs, which no other one reaches."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 2, stride=2)
        self.std = math.sqrt(2 / channels)

    def reset_parameters(self, generator: KeyedGenerator | None = None) -> None:
        if hasattr(self, "std"):
            _reset(self, self.std, generator or KeyedGenerator())

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:  # noqa: A002, the name in torch
        """[batch, channels, rows, columns] to [batch, channels, 2 rows, 2 columns], in the dtype of the weights."""
        return super().forward(input.to(self.weight.dtype), output_size)


class MapNorm(nn.GroupNorm):
    """GroupNorm of a map, which unlike BatchNorm gives the same in training and evaluation, and for any batch."""

    def __init__(self, channels: int) -> None:
        allowed = range(1, min(GROUPS, channels // LEAST_CHANNELS) + 1)
        super().__init__(max((count for count in allowed if channels % count == 0), default=1), channels)

    def reset_parameters(self, generator: KeyedGenerator | None = None) -> None:
        self.weight.data.fill_(1)
        self.bias.data.zero_()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, the name in torch
        return super().forward(input.to(self.weight.dtype))


def _reset(module: nn.Conv2d | nn.ConvTranspose2d, std: float, generator: KeyedGenerator) -> None:
    generator.normal_(module.weight, std)
    assert module.bias is not None
    module.bias.zero_()


def resized(x: Tensor, size: tuple[int, int]) -> Tensor:
    """The map with another number of rows and columns, by bilinear interpolation."""
    return F.interpolate(x, size=size, mode="bilinear", align_corners=False)
