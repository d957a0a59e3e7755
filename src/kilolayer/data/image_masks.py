"""Masks of images: which patches are hidden, the same number in every image.

Blocks are drawn by BEiT's rule (Bao et al. 2022, algorithm 1), until enough patches are hidden:

    s ~ U(least, missing),  r ~ log-uniform(0.3, 1 / 0.3),  height = round(sqrt(s r)),  width = round(sqrt(s / r))

A block that does not leave a row and a column of the image free is not used, as in BEiT's code. Of the last block, only as many
patches are hidden as are missing, row by row. What is drawn depends on the seed, the image and the epoch alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kilolayer.config import bounded, check
from kilolayer.data.image_draws import log_uniform, uniform
from kilolayer.errors import UnusedOptionError

LEAST_RATIO = 0.3
USUAL_BLOCK = 16
"""BEiT's smallest block, of images of 14 x 14 patches."""
BLOCKS = 16
"""Blocks that are drawn for an image. Where these hide too few patches, the others are drawn one by one."""
AREA, RATIO, TOP = range(3)
"""The numbers of the draws of a block; that of its first column follows that of its first row."""
FIRST_DRAW = 1 << 20
"""The number of the first draw of a mask, beyond those of augmentation."""


@dataclass(frozen=True, kw_only=True)
class ImageMaskingConfig:
    """`[masking]`: which patches of an image are hidden."""

    kind: Literal["blocks", "random"] = "blocks"
    """blocks: rectangles of patches, as in BEiT; random: patches independent of each other, as in MAE."""
    share: float = bounded(0.4, above=0, below=1)
    """Share of the patches that are hidden. Default: 0.4 for blocks, 0.75 for random."""
    block: int | None = bounded(None, least=1, most=2**20)
    """Patches of the smallest block. Default: 16, or a quarter of the hidden patches if that is less."""

    def __post_init__(self) -> None:
        check(self)
        if self.block is not None and self.kind != "blocks":
            raise UnusedOptionError(
                f"block has no effect on kind = {self.kind!r}",
                fix='remove it, or set kind = "blocks"',
                unused="block",
                beside=("kind",),
            )

    def count(self, patches: int) -> int:
        """The number of hidden patches of an image, at least one; at least one is visible."""
        return min(max(1, round(self.share * patches)), patches - 1)

    def least(self, patches: int) -> int:
        """The number of patches of the smallest block."""
        return self.block or min(USUAL_BLOCK, max(1, self.count(patches) // 4))


class ImageMasks:
    """Draws the masks of images of a grid of (rows, columns) patches."""

    def __init__(self, config: ImageMaskingConfig, grid: tuple[int, int], seed: int) -> None:
        self.config, self.grid, self.seed, self.patches = config, grid, seed, grid[0] * grid[1]
        self.count, self.least = config.count(self.patches), config.least(self.patches)
        self._made: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, keys: Tensor) -> Tensor:
        """int64 [rows, patches]: of each image the visible patches, then the `count` hidden ones, each in ascending order.

        keys: int64 [rows, 2], image and epoch.
        """
        hidden = self._blocks(keys) if self.config.kind == "blocks" else self._random(keys)
        return hidden.byte().argsort(dim=1, stable=True)

    def _random(self, keys: Tensor) -> Tensor:
        """bool [rows, patches]."""
        draws = uniform(self.seed, keys, self.patches, FIRST_DRAW)
        return ranks(draws) < self.count

    def _blocks(self, keys: Tensor) -> Tensor:
        """bool [rows, patches]."""
        draws = uniform(self.seed, keys, 4 * BLOCKS + self.patches, FIRST_DRAW)
        blocks, patches = draws[:, : 4 * BLOCKS].unflatten(1, (BLOCKS, 4)), draws[:, 4 * BLOCKS :]
        ratio = log_uniform(blocks[..., RATIO], LEAST_RATIO, 1 / LEAST_RATIO)
        sides = torch.stack([ratio.sqrt(), ratio.rsqrt()], dim=-1)  # of a block of area 1
        hidden = torch.zeros(len(keys), self.patches, dtype=torch.bool, device=keys.device)
        missing = self.count - hidden.sum(dim=1, keepdim=True)
        for block in range(BLOCKS):
            area = self.least + blocks[:, block, AREA, None] * (missing.clamp(min=self.least) - self.least)
            new = self._inside((area.sqrt() * sides[:, block]).round(), blocks[:, block, TOP:]) & ~hidden
            hidden = hidden | (new & (new.cumsum(dim=1) <= missing))
            missing = self.count - hidden.sum(dim=1, keepdim=True)
        return hidden | (ranks(patches.masked_fill(hidden, 2.0)) < missing)

    def _inside(self, size: Tensor, start: Tensor) -> Tensor:
        """bool [rows, patches]: the patches of a block of each image; none of one that is too large.

        size: height and width [rows, 2]. start: from 0, at the first row or column, to 1, at the last that it can have.
        """
        at, limits = self._coordinates(size.device)
        first = (start * (limits - size)).floor()
        fits = (size < (limits - 1).clamp(min=2)).all(dim=1, keepdim=True)
        offset = at - first[:, None]
        return ((offset >= 0) & (offset < (size * fits)[:, None])).all(dim=-1)

    def _coordinates(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row and column of each patch, fp32 [patches, 2], and the numbers of rows and columns plus 1, [2]; made once."""
        if device not in self._made:
            rows, columns = self.grid
            at = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).float()
            self._made[device] = at.to(device), torch.tensor([rows + 1.0, columns + 1.0], device=device)
        return self._made[device]


def ranks(values: Tensor) -> Tensor:
    """int64 [rows, n]: how many values of its row are smaller than each; the first of equal ones counts as smaller."""
    return values.argsort(dim=1, stable=True).argsort(dim=1)
