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
BLOCKS = 24
"""Blocks that are drawn for an image. In the rare case that these hide too few patches, the others are drawn one by one."""
AREA, RATIO, TOP, LEFT = range(4)
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
        hidden = torch.zeros(len(keys), self.patches, dtype=torch.bool, device=keys.device)
        for block in draws[:, : 4 * BLOCKS].unflatten(1, (BLOCKS, 4)).unbind(1):
            missing = self.count - hidden.sum(dim=1, keepdim=True)
            new = self._block(block, missing) & ~hidden
            hidden = hidden | (new & (new.cumsum(dim=1) <= missing))
        others = draws[:, 4 * BLOCKS :].masked_fill(hidden, 2.0)
        return hidden | (ranks(others) < self.count - hidden.sum(dim=1, keepdim=True))

    def _block(self, draws: Tensor, missing: Tensor) -> Tensor:
        """bool [rows, patches]: a block of each image; none if it is too large. draws: [rows, 4]. missing: int64 [rows, 1]."""
        area = self.least + draws[:, AREA] * (missing[:, 0].clamp(min=self.least) - self.least)
        ratio = log_uniform(draws[:, RATIO], LEAST_RATIO, 1 / LEAST_RATIO)
        sizes = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
        along = []
        for side, size, start in zip(self.grid, sizes, (draws[:, TOP], draws[:, LEFT]), strict=True):
            first = (start * (side - size + 1)).floor()[:, None]
            at = torch.arange(side, device=draws.device)
            along.append((at >= first) & (at < first + size[:, None]) & (size <= max(1, side - 1))[:, None])
        return (along[0][:, :, None] & along[1][:, None, :]).flatten(1)


def ranks(values: Tensor) -> Tensor:
    """int64 [rows, n]: how many values of its row are smaller than each; the first of equal ones counts as smaller."""
    return values.argsort(dim=1, stable=True).argsort(dim=1)
