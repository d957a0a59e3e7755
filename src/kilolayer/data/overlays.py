"""Maps of classes in colors, laid over their images."""

from __future__ import annotations

import colorsys

import numpy as np

from kilolayer.data.augment import IGNORED

GOLDEN = 0.618034
"""Hues that are this share of a circle apart stay far from each other, however many there are."""


def class_colors(count: int) -> np.ndarray:
    """uint8 [count, 3]: a color for each class."""
    found = [
        colorsys.hsv_to_rgb(number * GOLDEN % 1, (0.85, 0.55, 1.0)[number % 3], (1.0, 0.95, 0.65)[number // 3 % 3])
        for number in range(count)
    ]
    return (np.array(found).reshape(count, 3) * 255).round().astype(np.uint8)


def overlay(pixels: np.ndarray, ids: np.ndarray, classes: int, share: float = 0.6) -> np.ndarray:
    """The image with the color of each pixel's class: uint8 [height, width, 3].

    pixels: uint8 [height, width, 1 or 3]. ids: int [height, width], classes; 255: void, which stays as it is. share: of the
    color.
    """
    image = np.broadcast_to(pixels, (*pixels.shape[:2], 3)).astype(np.float32)
    colored = class_colors(classes)[np.where(ids == IGNORED, 0, ids)]
    mixed = (1 - share) * image + share * colored
    return np.where((ids == IGNORED)[..., None], image, mixed).round().astype(np.uint8)
