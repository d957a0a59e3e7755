"""Position encodings in two axes, for patches that lie in rows and columns.

    learned:     x + table[patch], resampled for an image of another size
    sinusoidal:  x + (sinusoids(row), sinusoids(column)), half of the width each
    rotary:      half of each head is rotated by angles proportional to the row, half by the column

The class token lies nowhere: it has a learned vector of its own, no sinusoids, and is not rotated.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kilolayer.errors import InputError
from kilolayer.layers.context import Sequences
from kilolayer.layers.initialize import KeyedGenerator
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.position import NoPositions, Positions, Rotary, Rotation, rotation_angles, sinusoids

Grid = tuple[int, int]
"""Rows and columns of patches."""


def coordinates_of(grid: Grid, device: torch.device) -> Tensor:
    """Row and column of each patch, row by row: int64 [patches, 2]."""
    rows, columns = (torch.arange(count, device=device) for count in grid)
    return torch.cartesian_prod(rows, columns)


def placed(x: Tensor, grid: Grid, first_patch: int) -> Sequences:
    """The states of a class token, if there is one, and of all patches, [batch, (1 +) patches, dim], with their coordinates."""
    return Sequences(x, coordinates=F.pad(coordinates_of(grid, x.device), (0, 0, first_patch, 0))[None])


def resampled(weights: Tensor, from_grid: Grid, to_grid: Grid) -> Tensor:
    """The vectors of learned positions for another grid, by bicubic interpolation: [patches, dim] to [new patches, dim].

    A row before those of the patches, [1 + patches, dim], is that of the class token and stays as it is.
    """
    first = len(weights) - from_grid[0] * from_grid[1]
    if first not in (0, 1):
        raise InputError(
            f"{len(weights)} vectors do not fit a grid of {from_grid[0]} x {from_grid[1]} patches",
            fix="give one for each patch, or one more for the class token",
        )
    if from_grid == to_grid:
        return weights
    own, patches = weights[:first], weights[first:]
    image = patches.T.unflatten(1, from_grid)[None]
    found = F.interpolate(image, size=to_grid, mode="bicubic", align_corners=False)
    return torch.cat([own, found[0].flatten(1).T])


class LearnedGrid(nn.Module):
    """x + table[patch], with a learned table [(1 +) patches, dim] initialized from N(0, std^2)."""

    def __init__(self, grid: Grid, dim: int, first_patch: int, std: float) -> None:
        super().__init__()
        self.grid, self.std = grid, std
        self.weight = nn.Parameter(torch.empty(first_patch + grid[0] * grid[1], dim))

    def reset_parameters(self, generator: KeyedGenerator | None = None) -> None:
        generator = generator or KeyedGenerator()
        generator.normal_(self.weight, self.std)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """[batch, (1 +) patches, dim] to the same shape, for an image with this grid."""
        return x + resampled(self.weight, self.grid, grid)


class SinusoidalGrid(nn.Module):
    """x + (sinusoids(row), sinusoids(column)): [batch, (1 +) patches, dim] to the same shape."""

    def __init__(self, first_patch: int) -> None:
        super().__init__()
        self.first_patch = first_patch

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        rows, columns = coordinates_of(grid, x.device).unbind(-1)
        waves = torch.cat([sinusoids(each, x.shape[-1] // 2, x.dtype) for each in (rows, columns)], dim=-1)
        return x + F.pad(waves, (0, 0, self.first_patch, 0))


def make_grid_positions(options: LayerOptions, grid: Grid, first_patch: int, std: float) -> nn.Module:
    """What is added to the embedded patches and class token. std: of initial learned vectors."""
    if options.positions == "learned":
        return LearnedGrid(grid, options.dim, first_patch, std)
    return SinusoidalGrid(first_patch) if options.positions == "sinusoidal" else NoPositions()


class RotaryGrid(Rotary):
    """Rotary positions in two axes: pairs in the first half of the angles turn with the row, the others with the column."""

    def forward(self, positions_BL: Tensor, dtype: torch.dtype) -> Rotation:
        """positions_BL: row and column of each position, int [1 or batch, length, 2]; those at (0, 0) are not rotated."""
        by_axis = [rotation_angles(each, self.head_dim // 2, dtype) for each in positions_BL.unbind(-1)]
        angles = torch.cat(by_axis, dim=-1).repeat(1, 1, 2)[:, None]
        return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


class StackGridPositions(Positions):
    """The position encoding of a stack that reads patches; what is added to its input is added before."""

    def __init__(self, options: LayerOptions) -> None:
        super().__init__(options, "encoder")
        self.at_input = NoPositions()
        if options.positions == "rotary":
            self.rotary = RotaryGrid(options.head_dim, decays=False)
