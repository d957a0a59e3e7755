"""Heads that score every pixel of an image: a linear map of the last states, and UperNet on the states of four depths.

UperNet (Xiao et al. 2018), on a stack whose states have one resolution as in BEiT (Bao et al. 2022): the states after each
quarter of the layers become maps of 4, 2, 1 and 1/2 times the patches' resolution,

    top = smooth_4([m_4, pooled m_4]),    l_i = lateral_i(m_i) + upsample(l_{i+1}),    scores = W fuse([smooth_i(l_i)])

Here all norms are GroupNorm where UperNet has BatchNorm, so that nothing depends on the other images of a batch, small batches
train, and a step keeps no running averages. The states of each depth are normalized by the model's norm first, because those
between the layers of some recipes grow with depth.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kilolayer.layers.convolution import Convolution, Doubling, MapNorm, PreciseConvolution, resized
from kilolayer.layers.grid_positions import Grid
from kilolayer.layers.norms.base import make_norm
from kilolayer.models.config import ModelConfig
from kilolayer.models.map_head import MapHead
from kilolayer.recipes.base import NORM

POOLED = (1, 2, 3, 6)
"""The sizes to which the pyramid pools the coarsest map."""
QUARTERS = 4


class LinearMap(nn.Module):
    """W x + b at each patch, upsampled to pixels: states [batch, patches, dim] to scores [batch, classes, height, width]."""

    depths: tuple[int, ...] = ()

    def __init__(self, config: ModelConfig, head: MapHead) -> None:
        super().__init__()
        self.dropout = nn.Dropout(head.dropout) if head.dropout else nn.Identity()
        self.output = PreciseConvolution(config.dim, head.classes, 1)

    def forward(self, states: Sequence[Tensor], grid: Grid, size: tuple[int, int]) -> Tensor:
        """states: the last states of all patches alone. size: height and width in pixels."""
        return resized(self.output(self.dropout(as_map(states[-1], grid))), size)


class UperNet(nn.Module):
    """Scores of pixels from the states after four depths: [batch, patches, dim] each to [batch, classes, height, width]."""

    def __init__(self, config: ModelConfig, head: MapHead) -> None:
        super().__init__()
        dim, layers = config.dim, config.depths.encoder
        width = dim if head.channels is None else head.channels
        self.depths = tuple(-(-layers * quarter // QUARTERS) for quarter in range(1, QUARTERS + 1))
        self.norms = nn.ModuleList(make_norm(NORM, dim, config) for _ in self.depths)
        self.scalings = nn.ModuleList(
            [
                nn.Sequential(Doubling(dim), MapNorm(dim), nn.GELU(), Doubling(dim)),
                Doubling(dim),
                nn.Identity(),
                nn.MaxPool2d(2, ceil_mode=True),
            ]
        )
        self.pooled = nn.ModuleList(_convolution(dim, width, 1) for _ in POOLED)
        self.top = _convolution(dim + len(POOLED) * width, width, 3)
        self.laterals = nn.ModuleList(_convolution(dim, width, 1) for _ in self.depths[:-1])
        self.smooths = nn.ModuleList(_convolution(width, width, 3) for _ in self.depths[:-1])
        self.fuse = _convolution(len(self.depths) * width, width, 3)
        self.dropout = nn.Dropout(head.dropout) if head.dropout else nn.Identity()
        self.output = PreciseConvolution(width, head.classes, 1)

    def forward(self, states: Sequence[Tensor], grid: Grid, size: tuple[int, int]) -> Tensor:
        """states: those of all patches after each of `depths`. size: height and width in pixels."""
        normed = [norm(state) for norm, state in zip(self.norms, states, strict=True)]
        maps = [scaling(as_map(state, grid)) for scaling, state in zip(self.scalings, normed, strict=True)]
        levels = [lateral(each) for lateral, each in zip(self.laterals, maps[:-1], strict=True)]
        above = top = self._pyramid(maps[-1])
        for index in reversed(range(len(levels))):
            above = levels[index] = levels[index] + resized(above, _size(levels[index]))
        smooth = [convolve(level) for convolve, level in zip(self.smooths, levels, strict=True)]
        finest = _size(levels[0])
        fused = self.fuse(torch.cat([resized(each, finest) for each in (*smooth, top)], dim=1))
        return resized(self.output(self.dropout(fused)), size)

    def _pyramid(self, x: Tensor) -> Tensor:
        parts = [convolve(F.adaptive_avg_pool2d(x, side)) for convolve, side in zip(self.pooled, POOLED, strict=True)]
        return self.top(torch.cat([x.to(parts[0].dtype), *(resized(part, _size(x)) for part in parts)], dim=1))


MAP_HEADS = {"linear": LinearMap, "upernet": UperNet}


def as_map(states: Tensor, grid: Grid) -> Tensor:
    """[batch, patches, dim] to [batch, dim, rows, columns]."""
    return states.transpose(1, 2).unflatten(2, grid)


def _convolution(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(Convolution(inputs, outputs, kernel), MapNorm(outputs), nn.ReLU())


def _size(x: Tensor) -> tuple[int, int]:
    return x.shape[2], x.shape[3]
