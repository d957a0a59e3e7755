"""RandAugment (Cubuk et al. 2020): operations drawn for each image, all of one strength, for a whole batch on its device.

An operation is as Pillow computes it, in whole levels from 0 to 255. All are computed for the whole batch, and each image takes
its own: nothing is read back from the device.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

COLORS = (
    "identity",
    "autocontrast",
    "equalize",
    "solarize",
    "color",
    "posterize",
    "contrast",
    "brightness",
    "sharpness",
)
"""The operations that leave every pixel in its place."""
OPERATIONS = (*COLORS, "rotate", "shear_x", "shear_y", "translate_x", "translate_y")
DRAWS = 2
"""Draws for each operation of an image: which, and in which direction."""
STRONGEST = 10.0
DEGREES, SHEAR, SHIFT, BLEND, BITS = 30.0, 0.3, 0.45, 0.9, 4
"""At the strongest magnitude: rotation, shear, translation as a share of the side, distance of an enhancement's factor from 1,
and lowest bits removed."""


def randaugment(levels: Tensor, draws: Tensor, magnitude: float, operations: tuple[str, ...] = OPERATIONS) -> Tensor:
    """Apply operations to images, one after the other.

    levels: fp32 [rows, channels, height, width], whole numbers from 0 to 255. draws: uniform, fp32 [rows, operations, 2].
    operations: the first ones of all, to choose from.
    """
    for each in draws.unbind(1):
        operation = (each[:, 0] * len(operations)).long()
        sign = torch.where(each[:, 1] < 0.5, -1.0, 1.0)
        levels = apply(levels, operation, sign * magnitude / STRONGEST)
    return levels


def apply(levels: Tensor, operation: Tensor, strength: Tensor) -> Tensor:
    """Apply to each image the operation with its number, int64 [rows], at a strength of -1 to 1, fp32 [rows]."""
    mine = {name: (operation == number).view(-1, 1, 1, 1) for number, name in enumerate(OPERATIONS)}
    amount = strength.view(-1, 1, 1, 1)
    turned = warp(levels, matrices(operation, strength, levels.shape[-2:]))
    geometric = mine["rotate"] | mine["shear_x"] | mine["shear_y"] | mine["translate_x"] | mine["translate_y"]
    found = torch.where(geometric, turned, levels)
    enhanced = mine["brightness"] | mine["color"] | mine["contrast"] | mine["sharpness"]
    found = torch.where(enhanced, _blended(_faded(levels, mine), levels, 1 + BLEND * amount), found)
    found = torch.where(mine["posterize"], _posterized(levels, amount), found)
    found = torch.where(mine["solarize"], torch.where(levels >= 256 * (1 - amount.abs()), 255 - levels, levels), found)
    found = torch.where(mine["autocontrast"], _stretched(levels), found)
    return torch.where(mine["equalize"], _equalized(levels), found)


def matrices(operation: Tensor, strength: Tensor, size: torch.Size) -> Tensor:
    """The affine map from a pixel (x, y) of the image to one of the result: fp32 [rows, 2, 3].

    It is the inverse of p = A (q - center) + center + shift, which says where a pixel q of the result comes from.
    """
    height, width = size

    def of(name: str) -> Tensor:
        return torch.where(operation == OPERATIONS.index(name), strength, 0.0)

    angle = of("rotate") * math.radians(DEGREES)
    a = d = angle.cos()
    b, c = SHEAR * of("shear_x") - angle.sin(), SHEAR * of("shear_y") + angle.sin()
    x, y = (width - 1) / 2, (height - 1) / 2
    right, down = x + of("translate_x") * SHIFT * width, y + of("translate_y") * SHIFT * height
    determinant = a * d - b * c
    top = torch.stack([d, -b, b * down - d * right], dim=1)
    bottom = torch.stack([-c, a, c * right - a * down], dim=1)
    center = torch.stack([torch.full_like(a, x), torch.full_like(a, y)], dim=1)
    inverse = torch.stack([top, bottom], dim=1) / determinant.view(-1, 1, 1)
    return inverse + F.pad(center.unsqueeze(2), (2, 0))


def warp(levels: Tensor, affine: Tensor) -> Tensor:
    """Map images, bilinear; what comes from outside is grey. affine: fp32 [rows, 2, 3], from the image to the result."""
    from kornia.geometry.transform import warp_affine

    middle = 128.0
    moved = warp_affine(levels - middle, affine, (levels.shape[2], levels.shape[3]), padding_mode="zeros")
    return (moved + middle).round().clamp(0, 255)


def grey(levels: Tensor) -> Tensor:
    """Luma, in whole levels: [rows, 1, height, width]."""
    if levels.shape[1] == 1:
        return levels
    red, green, blue = levels.unsqueeze(2).unbind(1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 32768) / 65536).floor()


def _faded(levels: Tensor, mine: dict[str, Tensor]) -> Tensor:
    """What an enhancement moves an image away from: black, grey, its mean grey, or a smooth image."""
    luma = grey(levels)
    mean = (luma.mean(dim=(2, 3), keepdim=True) + 0.5).floor()
    base = torch.where(mine["color"], luma, torch.where(mine["contrast"], mean, 0.0))
    return torch.where(mine["sharpness"], _smoothed(levels), base)


def _blended(base: Tensor, levels: Tensor, factor: Tensor) -> Tensor:
    return (base + factor * (levels - base)).clamp(0, 255).floor()


def _smoothed(levels: Tensor) -> Tensor:
    """The mean of 3 x 3 pixels in which the middle counts five times; the border stays."""
    height, width = levels.shape[-2:]
    inner = 4 * levels[..., 1:-1, 1:-1]
    for y in range(3):
        for x in range(3):
            inner = inner + levels[..., y : height - 2 + y, x : width - 2 + x]
    smooth = levels.clone()
    smooth[..., 1:-1, 1:-1] = (inner / 13 + 0.5).floor()
    return smooth


def _posterized(levels: Tensor, amount: Tensor) -> Tensor:
    """Without the lowest bits."""
    unit = 2 ** (BITS * amount.abs()).floor()
    return (levels / unit).floor() * unit


def _stretched(levels: Tensor) -> Tensor:
    """Each channel from its darkest to its brightest pixel, over all levels."""
    low, high = levels.amin(dim=(2, 3), keepdim=True), levels.amax(dim=(2, 3), keepdim=True)
    scale = 255 / (high - low).clamp(min=1)
    return torch.where(high > low, (levels * scale - low * scale).clamp(0, 255).floor(), levels)


def _equalized(levels: Tensor) -> Tensor:
    from kornia.enhance import equalize

    return (equalize(levels / 255) * 255).round()
