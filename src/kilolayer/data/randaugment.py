"""RandAugment (Cubuk et al. 2020): operations drawn for each image, all of one strength, for a whole batch on its device.

An operation is as Pillow computes it, in whole levels from 0 to 255. All are computed for the whole batch, and each image takes
its own: nothing is read back from the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

OPERATIONS = (
    "identity",
    "autocontrast",
    "equalize",
    "rotate",
    "solarize",
    "color",
    "posterize",
    "contrast",
    "brightness",
    "sharpness",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
)
COLORS = tuple(name for name in OPERATIONS if name != "rotate" and not name.startswith(("shear", "translate")))
"""The operations that leave every pixel in its place."""
DRAWS = 2
"""Draws for each operation of an image: which, and in which direction."""
STRONGEST = 10.0
DEGREES, SHEAR, SHIFT, BLEND, BITS = 30.0, 0.3, 0.45, 0.9, 4
"""At the strongest magnitude: rotation, shear, translation as a share of the side, distance of an enhancement's factor from 1,
and lowest bits removed."""


def randaugment(levels: Tensor, draws: Tensor, magnitude: float, operations: tuple[str, ...] = OPERATIONS) -> Tensor:
    """Apply operations to images, one after the other.

    levels: fp32 [rows, channels, height, width], whole numbers from 0 to 255. draws: uniform, fp32 [rows, operations, 2].
    operations: those to choose from.
    """
    numbers = torch.tensor([OPERATIONS.index(name) for name in operations], device=levels.device)
    for each in draws.unbind(1):
        operation = numbers[(each[:, 0] * len(operations)).long()]
        sign = torch.where(each[:, 1] < 0.5, -1.0, 1.0)
        levels = apply(levels, operation, sign * magnitude / STRONGEST)
    return levels


def apply(levels: Tensor, operation: Tensor, strength: Tensor) -> Tensor:
    """Apply to each image the operation with its number, int64 [rows], at a strength of -1 to 1, fp32 [rows]."""
    mine = {name: (operation == number).view(-1, 1, 1, 1) for number, name in enumerate(OPERATIONS)}
    amount = strength.view(-1, 1, 1, 1)
    turned = warp(levels, *matrices(operation, strength, levels.shape[-2:]))
    geometric = mine["rotate"] | mine["shear_x"] | mine["shear_y"] | mine["translate_x"] | mine["translate_y"]
    found = torch.where(geometric, turned, levels)
    enhanced = mine["brightness"] | mine["color"] | mine["contrast"] | mine["sharpness"]
    found = torch.where(enhanced, _blended(_faded(levels, mine), levels, 1 + BLEND * amount), found)
    found = torch.where(mine["posterize"], _posterized(levels, amount), found)
    found = torch.where(mine["solarize"], torch.where(levels >= 256 * (1 - amount.abs()), 255 - levels, levels), found)
    found = torch.where(mine["autocontrast"], _stretched(levels), found)
    return torch.where(mine["equalize"], _equalized(levels), found)


def matrices(operation: Tensor, strength: Tensor, size: torch.Size) -> tuple[Tensor, Tensor]:
    """The map from a pixel of the result to one of the image, around the center: fp32 [rows, 2, 2] and [rows, 2] (x, y)."""
    height, width = size

    def of(name: str) -> Tensor:
        return torch.where(operation == OPERATIONS.index(name), strength, 0.0)

    angle, zero = of("rotate") * math.radians(DEGREES), torch.zeros_like(strength)
    cosine, sine = angle.cos(), angle.sin()
    linear = torch.stack([cosine, SHEAR * of("shear_x") - sine, SHEAR * of("shear_y") + sine, cosine], dim=1).view(-1, 2, 2)
    shift = torch.stack([of("translate_x") * SHIFT * width, of("translate_y") * SHIFT * height], dim=1)
    return linear, shift + zero[:, None]


def warp(levels: Tensor, linear: Tensor, shift: Tensor) -> Tensor:
    """Map images around their centers, bilinear; what comes from outside is grey."""
    from kornia.geometry.transform import warp_affine

    height, width = levels.shape[-2:]
    center = torch.tensor([(width - 1) / 2, (height - 1) / 2], device=levels.device)
    inverse = torch.linalg.inv_ex(linear)[0]  # kornia takes the map from the image to the result
    back = center - (inverse @ (center + shift).unsqueeze(2)).squeeze(2)
    middle = 128.0
    moved = warp_affine(levels - middle, torch.cat([inverse, back.unsqueeze(2)], dim=2), (height, width), padding_mode="zeros")
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
