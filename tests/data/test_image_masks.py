"""Masks of images against BEiT's rule, written as a loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kilolayer.data.image_draws import uniform
from kilolayer.data.image_masks import BLOCKS, FIRST_DRAW, ImageMaskingConfig, ImageMasks
from kilolayer.errors import OptionError

GRIDS = [(14, 14), (8, 8), (4, 6), (2, 2), (1, 9)]


def keys_of(images: int, epoch: int = 0, first: int = 0) -> torch.Tensor:
    return torch.stack([torch.arange(first, first + images), torch.full((images,), epoch)], dim=1)


def hidden_of(masks: ImageMasks, keys: torch.Tensor) -> np.ndarray:
    """bool [rows, patches]."""
    order = masks(keys)
    assert torch.equal(order.sort(dim=1).values, torch.arange(masks.patches).expand_as(order))
    for part in (order[:, : -masks.count], order[:, -masks.count :]):
        assert (part.diff(dim=1) > 0).all()
    return torch.zeros_like(order, dtype=torch.bool).scatter(1, order[:, -masks.count :], value=True).numpy()


def naive_blocks(grid: tuple[int, int], count: int, least: int, draws: list[float]) -> list[bool]:
    """One image, block by block; draws: four for each block, then one for each patch."""
    rows, columns = grid
    hidden = [[False] * columns for _ in range(rows)]
    for block in range(BLOCKS):
        missing = count - sum(map(sum, hidden))
        area, ratio, top, left = draws[4 * block : 4 * block + 4]
        s = least + area * (max(missing, least) - least)
        r = math.exp(math.log(0.3) + ratio * (math.log(1 / 0.3) - math.log(0.3)))
        height, width = round(math.sqrt(s * r)), round(math.sqrt(s / r))
        if height > max(1, rows - 1) or width > max(1, columns - 1):
            continue
        first_row, first_column = math.floor(top * (rows - height + 1)), math.floor(left * (columns - width + 1))
        for row in range(first_row, first_row + height):
            for column in range(first_column, first_column + width):
                if missing and not hidden[row][column]:
                    hidden[row][column], missing = True, missing - 1
    flat = [each for row in hidden for each in row]
    visible = sorted((index for index, each in enumerate(flat) if not each), key=lambda index: draws[4 * BLOCKS + index])
    for index in visible[: count - sum(flat)]:
        flat[index] = True
    return flat


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("share", [0.4, 0.75])
def test_blocks_are_those_of_a_loop_over_one_image(grid: tuple[int, int], share: float) -> None:
    masks = ImageMasks(ImageMaskingConfig(share=share), grid, seed=7)
    keys = keys_of(40, epoch=3)
    found, draws = hidden_of(masks, keys), uniform(7, keys, 4 * BLOCKS + masks.patches, FIRST_DRAW).tolist()
    expected = np.array([naive_blocks(grid, masks.count, masks.least, each) for each in draws])
    # Single and double precision may round to another patch.
    assert (found == expected).all(axis=1).sum() >= 39
    assert (found.sum(axis=1) == masks.count).all()


def beits_mask(rng: np.random.Generator, grid: tuple[int, int], count: int, least: int) -> np.ndarray:
    """BEiT's own loop: a block with too many new patches is drawn again, and after ten in vain the mask is as it is."""
    hidden = np.zeros(grid, bool)
    while (missing := count - hidden.sum()) > 0:
        for _ in range(10):
            area, ratio = least + rng.random() * (missing - least), np.exp(rng.uniform(np.log(0.3), -np.log(0.3)))
            height, width = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
            if height < grid[0] and width < grid[1]:
                top, left = rng.integers(grid[0] - height + 1), rng.integers(grid[1] - width + 1)
                block = np.zeros(grid, bool)
                block[top : top + height, left : left + width] = True
                if 0 < (block & ~hidden).sum() <= missing:
                    hidden |= block
                    break
        else:
            break
    return hidden


def borders(hidden: np.ndarray) -> float:
    """Mean number of pairs of neighbours, one of which is hidden: small for large blocks."""
    across, down = hidden[:, :, 1:] != hidden[:, :, :-1], hidden[:, 1:] != hidden[:, :-1]
    return float(across.sum() + down.sum()) / len(hidden)


def test_blocks_have_the_shape_of_those_of_beit() -> None:
    masks = ImageMasks(ImageMaskingConfig(), (14, 14), seed=1)
    assert (masks.count, masks.least) == (78, 16)
    ours = hidden_of(masks, keys_of(600)).reshape(-1, 14, 14)
    rng = np.random.default_rng(0)
    theirs = np.array([beits_mask(rng, (14, 14), 78, 16) for _ in range(600)])
    assert 70 < theirs.sum(axis=(1, 2)).mean() <= 78
    random = hidden_of(ImageMasks(ImageMaskingConfig(kind="random", share=0.4), (14, 14), seed=1), keys_of(600))
    assert borders(ours) == pytest.approx(borders(theirs), rel=0.1)
    assert borders(ours) < 0.5 * borders(random.reshape(-1, 14, 14))
    # The middle is hidden more often than the corners, alike.
    for at in ((0, 0), (7, 7), (0, 7)):
        assert ours[:, at[0], at[1]].mean() == pytest.approx(theirs[:, at[0], at[1]].mean(), abs=0.08)


def test_random_masks_hide_every_patch_equally_often() -> None:
    masks = ImageMasks(ImageMaskingConfig(kind="random", share=0.75), (8, 8), seed=1)
    hidden = hidden_of(masks, keys_of(4000))
    assert (hidden.sum(axis=1) == 48).all()
    assert abs(hidden.mean(axis=0) - 0.75).max() < 4.5 * math.sqrt(0.75 * 0.25 / 4000)
    assert abs(np.corrcoef(hidden.T)[0, 1:] + 1 / 63).max() < 4.5 / math.sqrt(4000)


@pytest.mark.parametrize("kind", ["blocks", "random"])
def test_a_mask_depends_on_seed_image_and_epoch_alone(kind: str) -> None:
    config = ImageMaskingConfig(kind=kind)  # type: ignore[arg-type]
    masks = ImageMasks(config, (8, 8), seed=1)
    whole = masks(keys_of(50, epoch=2))
    assert torch.equal(masks(keys_of(5, epoch=2, first=20).flip(0)).flip(0), whole[20:25])
    for other in (ImageMasks(config, (8, 8), seed=2)(keys_of(50, epoch=2)), masks(keys_of(50, epoch=3))):
        assert not (other == whole).all(dim=1).any()


def test_small_grids_have_small_blocks_and_keep_a_patch_visible() -> None:
    config = ImageMaskingConfig()
    assert [config.least(patches) for patches in (196, 64, 16, 4)] == [16, 6, 1, 1]
    assert ImageMaskingConfig(block=3).least(196) == 3
    assert ImageMaskingConfig(share=0.99).count(4) == 3
    assert ImageMaskingConfig(share=0.01).count(4) == 1
    with pytest.raises(OptionError, match="block has no effect"):
        ImageMaskingConfig(kind="random", block=3)
