"""Segmentation of images of any size: the model reads tiles, and its scores are resampled to the pixels of the image.

A tile is as high or as wide as the image and has the ratio of sides of the run's images, so that it is scaled as they are,
without distortion. If one does not hold the image, tiles overlap by half or more, and each pixel has the scores of the tile
whose center is nearest (the overlap-tile strategy of Ronneberger et al. 2015).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.evaluate.segmentation import classes_of, pixel_scores
from kilolayer.models.encoder import Encoder
from kilolayer.runs.trained_run import batched

AT_ONCE = 2**24
"""Scores that are resampled at once: those of a photograph would take gigabytes."""


@dataclass(frozen=True)
class Span:
    """What a tile covers of the rows or columns of an image, from `start` to `end`, and those that have its scores: `own`."""

    start: float
    end: float
    own: range


def spans(length: int, tile: float, pixel: float) -> list[Span]:
    """Spans of the size `tile` that cover `length` rows or columns, and overlap by half or more.

    pixel: the size of a pixel that the model reads; less than this is not worth another tile.
    """
    if length - tile < pixel:
        return [Span(0.0, length, range(length))]
    count = 1 + math.ceil((length - tile) / (tile / 2))
    starts = [(length - tile) * index / (count - 1) for index in range(count)]
    middles = [round((first + second + tile) / 2) for first, second in pairwise(starts)]
    bounds = [0, *middles, length]
    return [
        Span(start, min(start + tile, length), range(*own))
        for start, own in zip(starts, pairwise(bounds), strict=True)
        if own[0] < own[1]
    ]


def tiles(image: tuple[int, int], sides: tuple[int, int]) -> Iterator[tuple[Span, Span]]:
    """The rows and the columns of each tile. image: its height and width. sides: those of the run's images."""
    pixel = min(image[0] / sides[0], image[1] / sides[1])
    return product(spans(image[0], sides[0] * pixel, pixel), spans(image[1], sides[1] * pixel, pixel))


def segment_tiled(model: Encoder, images: Sequence[np.ndarray], sides: tuple[int, int], rows: int) -> list[np.ndarray]:
    """The classes of each image's pixels, uint8 [height, width]; images: uint8 [height, width, channels].

    rows: the number of tiles that the model reads at once.
    """
    found = [np.zeros(image.shape[:2], np.uint8) for image in images]
    every = ((index, *tile) for index, image in enumerate(images) for tile in tiles(image.shape[:2], sides))
    for some in batched(every, rows):
        pixels = np.stack([_cut(images[index], down, across, sides) for index, down, across in some])
        scores = pixel_scores(model, torch.from_numpy(pixels).permute(0, 3, 1, 2))
        for (index, down, across), each in zip(some, scores, strict=True):
            own = slice(across.own.start, across.own.stop)
            for first, part in resampled_classes(each, down, across):
                found[index][first : first + len(part), own] = part
    return found


def _cut(image: np.ndarray, down: Span, across: Span, sides: tuple[int, int]) -> np.ndarray:
    """A tile of an image at the size that the model reads, by the filter by which the run's images are scaled."""
    from PIL import Image

    whole = Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else image)
    box = (across.start, down.start, across.end, down.end)
    scaled = whole.resize((sides[1], sides[0]), Image.Resampling.BICUBIC, box=box)
    return np.asarray(scaled).reshape(*sides, image.shape[2])


def resampled_classes(scores: Tensor, down: Span, across: Span) -> Iterator[tuple[int, np.ndarray]]:
    """The best class of each pixel that has the scores of a tile, some rows at a time: the first row's index, and uint8
    [rows, columns].

    scores: fp32 [classes, height, width] of the tile, which are resampled bilinearly.
    """
    columns = _relative(across.own, across, scores)
    step = max(1, AT_ONCE // (len(scores) * len(columns)))
    for first in range(down.own.start, down.own.stop, step):
        lines = _relative(range(first, min(first + step, down.own.stop)), down, scores)
        grid = torch.stack(torch.meshgrid(columns, lines, indexing="xy"), dim=-1)
        resampled = F.grid_sample(scores[None], grid[None], mode="bilinear", padding_mode="border", align_corners=False)
        yield first, classes_of(resampled)[0]


def _relative(own: range, span: Span, like: Tensor) -> Tensor:
    """The centers of rows or columns in a tile, from -1 at its start to 1 at its end."""
    centers = torch.arange(own.start, own.stop, dtype=torch.float64) + 0.5
    return (2 * (centers - span.start) / (span.end - span.start) - 1).to(like)
