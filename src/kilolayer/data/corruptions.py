"""Corruptions of images: fifteen kinds in four groups at five strengths, after Hendrycks and Dietterich (2019, ImageNet-C).

Strengths are those of CIFAR-10-C, made for images of 32 pixels; lengths grow with the image. Four kinds differ: frost is drawn,
since the photographs that are mixed in there cannot be had; `glass_blur` displaces a share of the pixels, `elastic`
grows in all its parts, and the fourth `motion_blur` is longer, so that a higher strength is always further from the image.

Same pixels, same name, same strength and same seed: same result, however images are divided into batches.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.data.image_decoding import require_vision
from kilolayer.data.image_draws import uniform
from kilolayer.errors import InputError, unknown

CORRUPTIONS = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic", "pixelate", "jpeg"),
}
NAMES = tuple(name for group in CORRUPTIONS.values() for name in group)
STRENGTHS = (1, 2, 3, 4, 5)
SIDE = 32
"""The side of the images for which lengths are given, in pixels."""
PIXELS_AT_ONCE = 1 << 20
POISSON_STEPS = 4096


class Draws:
    """The draws of a batch, one after the other. keys: int64 [rows, 2], image and corruption."""

    def __init__(self, seed: int, keys: Tensor) -> None:
        self.seed, self.keys, self.taken = seed, keys, 0

    def uniform(self, *shape: int) -> Tensor:
        """fp32 [rows, *shape], inside (0, 1)."""
        count = math.prod(shape)
        found = uniform(self.seed, self.keys, count, self.taken)
        self.taken += count
        # The largest of the draws, rounded, would become 1.
        return (found + 2.0**-25).clamp(max=1 - 2.0**-24).view(len(self.keys), *shape)

    def normal(self, *shape: int) -> Tensor:
        """fp32 [rows, *shape], of mean 0 and variance 1."""
        return torch.special.ndtri(self.uniform(*shape))


Corruption = Callable[[Tensor, int, Draws], Tensor]
"""Images, fp32 [rows, channels, height, width] from 0 to 1; the strength, counted from 0; draws."""
_registry: dict[str, Corruption] = {}


def corrupt(pixels: Tensor, name: str, strength: int, seed: int = 0, first: int = 0) -> Tensor:
    """Corrupted images, uint8 [rows, channels, height, width], like `pixels`, and on the same device.

    strength: 1 to 5. first: the number of the first image, by which parts of a set are corrupted like the whole.
    """
    require_vision()
    if name not in _registry:
        raise unknown(name, NAMES, kind="corruption")
    if strength not in STRENGTHS:
        raise InputError(f"the strength of a corruption is {strength!r}", fix="it must be 1, 2, 3, 4 or 5")
    rows = max(1, PIXELS_AT_ONCE // pixels[0].numel())
    found = []
    for start in range(0, len(pixels), rows):
        few = pixels[start : start + rows]
        index = torch.arange(first + start, first + start + len(few), device=pixels.device)
        keys = torch.stack([index, torch.full_like(index, NAMES.index(name))], dim=1)
        changed = _registry[name](few.float() / 255, strength - 1, Draws(seed, keys))
        found.append((changed.clamp(0, 1) * 255).round().to(torch.uint8))
    return torch.cat(found)


def sketch(pixels: Tensor) -> Tensor:
    """Sketch-like renderings, uint8 [rows, channels, height, width]: the edges of an image, dark on white."""
    require_vision()
    from kornia.filters import sobel

    smooth = blurred(_grey(pixels.float() / 255), 0.5 * _unit(pixels))
    edges = sobel(smooth, normalized=True)
    strongest = edges.flatten(1).quantile(0.97, dim=1).clamp(min=0.02).view(-1, 1, 1, 1)
    drawn = 1 - (edges / strongest).clamp(0, 1) ** 0.8
    return (drawn * 255).round().to(torch.uint8).expand_as(pixels).contiguous()


def _corruption(function: Corruption) -> Corruption:
    _registry[function.__name__] = function
    return function


@_corruption
def gaussian_noise(images: Tensor, strength: int, draws: Draws) -> Tensor:
    """Normal noise, as in low light."""
    return images + (0.04, 0.06, 0.08, 0.09, 0.10)[strength] * draws.normal(*images.shape[1:])


@_corruption
def shot_noise(images: Tensor, strength: int, draws: Draws) -> Tensor:
    """A number of photons with a Poisson distribution, whose mean is in proportion to the level."""
    photons = (500, 250, 100, 75, 50)[strength]
    table = _poisson_quantiles(photons).to(images.device)
    level, step = (images * 255).round().long(), (draws.uniform(*images.shape[1:]) * POISSON_STEPS).long()
    return table[level, step] / photons


@_corruption
def impulse_noise(images: Tensor, strength: int, draws: Draws) -> Tensor:
    """Salt and pepper: a share of all values is 0 or 1."""
    share = (0.01, 0.02, 0.03, 0.05, 0.07)[strength]
    drawn = draws.uniform(*images.shape[1:])
    return torch.where(drawn < share / 2, 0.0, torch.where(drawn > 1 - share / 2, 1.0, images))


@_corruption
def defocus_blur(images: Tensor, strength: int, draws: Draws) -> Tensor:
    """A disk of confusion with a soft edge."""
    radius, softness = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1))[strength]
    unit = _unit(images)
    reach = math.ceil(radius * unit + 3 * softness * unit)
    at = torch.arange(-reach, reach + 1, device=images.device, dtype=torch.float32)
    disk = (at[:, None].square() + at.square() <= (radius * unit) ** 2).float()
    kernel = blurred(disk[None, None], softness * unit, border="constant")[0]
    return _filtered(images, kernel / kernel.sum())


@_corruption
def glass_blur(images: Tensor, strength: int, draws: Draws) -> Tensor:
    """Frosted glass: pixels take the colors of others near them, between two slight blurs."""
    share, passes = ((0.2, 1), (0.4, 1), (0.7, 1), (0.6, 2), (0.9, 2))[strength]
    sigma = 0.25
    unit = _unit(images)
    reach = max(1, round(unit))
    height, width = images.shape[-2:]
    found, plane = blurred(images, sigma * unit), _plane(images)
    for _ in range(passes):
        offsets = (draws.uniform(2, height, width) * (2 * reach + 1)).floor() - reach
        offsets = torch.where(draws.uniform(1, height, width) < share, offsets, 0.0)
        y = (plane[0] + offsets[:, 0]).clamp(0, height - 1).long()
        x = (plane[1] + offsets[:, 1]).clamp(0, width - 1).long()
        found = found.flatten(2).gather(2, (y * width + x).flatten(1)[:, None].expand(-1, images.shape[1], -1)).view_as(images)
    return blurred(found, sigma * unit)


@_corruption
def motion_blur(images: Tensor, strength: int, draws: Draws) -> Tensor:
    """A moving camera: the image along a line, in a direction up to 45 degrees from the horizontal."""
    radius, sigma = ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.25), (9, 2.5))[strength]
    return _moved(images, radius, sigma, (draws.uniform() - 0.5) * math.pi / 2)


@_corruption
def zoom_blur(images: Tensor, strength: int, draws: Draws) -> Tensor:
    """A camera that approaches: the mean of the image at growing scales."""
    most = (6, 11, 16, 21, 26)[strength]
    return (images + sum(_zoomed(images, 1 + step / 100) for step in range(most))) / (most + 1)


@_corruption
def snow(images: Tensor, strength: int, draws: Draws) -> Tensor:
    """Flakes of random noise, drawn out by their fall, over a paler image."""
    mean, deviation, zoom, least, radius, sigma, kept = (
        (0.1, 0.2, 1.0, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1.0, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    )[strength]
    flakes = _zoomed(mean + deviation * draws.normal(1, *images.shape[2:]), zoom)
    flakes = torch.where(flakes < least, 0.0, flakes.clamp(0, 1))
    flakes = _moved(flakes, radius, sigma, -math.pi / 4 - draws.uniform() * math.pi / 2)
    pale = torch.maximum(images, _grey(images) * 1.5 + 0.5)
    return kept * images + (1 - kept) * pale + flakes + flakes.flip(2, 3)


@_corruption
def frost(images: Tensor, strength: int, draws: Draws) -> Tensor:
    """Ice on a window, drawn: the ridges of cloud-like noise, in a pale blue, over a darker image."""
    kept, added = ((1.0, 0.2), (0.98, 0.3), (0.95, 0.4), (0.9, 0.5), (0.85, 0.6))[strength]
    ridges = [1 - (2 * _clouds(images, decay, draws) - 1).abs() for decay in (1.4, 1.4, 1.7)]
    fine, coarse = torch.maximum(ridges[0], ridges[1]) ** 6, ridges[2]
    ice = (0.25 + 0.75 * fine) * (0.4 + 0.6 * coarse)
    tint = images.new_tensor([0.8, 0.92, 1.0] if images.shape[1] == 3 else [0.9]).view(1, -1, 1, 1)
    return kept * images + added * ice * tint


@_corruption
def fog(images: Tensor, strength: int, draws: Draws) -> Tensor:
    """Cloud-like noise, added; levels are then scaled back."""
    density, decay = ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))[strength]
    brightest = images.amax(dim=(1, 2, 3), keepdim=True)
    return (images + density * _clouds(images, decay, draws)) * brightest / (brightest + density)


@_corruption
def brightness(images: Tensor, strength: int, draws: Draws) -> Tensor:
    """A larger value in HSV."""
    more = (0.05, 0.1, 0.15, 0.2, 0.3)[strength]
    if images.shape[1] == 1:
        return images + more
    from kornia.color import hsv_to_rgb, rgb_to_hsv

    hue, saturation, value = rgb_to_hsv(images).unbind(1)
    return hsv_to_rgb(torch.stack([hue, saturation, (value + more).clamp(0, 1)], dim=1))


@_corruption
def contrast(images: Tensor, strength: int, draws: Draws) -> Tensor:
    """Levels closer to the mean of their channel."""
    mean = images.mean(dim=(2, 3), keepdim=True)
    return mean + (0.75, 0.5, 0.4, 0.3, 0.15)[strength] * (images - mean)


@_corruption
def elastic(images: Tensor, strength: int, draws: Draws) -> Tensor:
    """A random affine map of the whole, and a smooth random displacement of each pixel."""
    amount, sigma, corner = ((1.2, 1.6, 0.8), (1.9, 1.6, 1.0), (2.6, 1.5, 1.2), (3.2, 1.3, 1.4), (3.8, 1.1, 1.6))[strength]
    unit, (height, width) = _unit(images), images.shape[2:]
    moved = (draws.uniform(2, 3) * 2 - 1) * corner * unit  # of three points: the middle, and a third of a side right and below
    y, x = _plane(images)
    third = min(height, width) / 3
    down, right = (y - (height - 1) / 2) / third, (x - (width - 1) / 2) / third
    smooth = blurred(draws.uniform(2, height, width) * 2 - 1, sigma * unit) * amount * unit
    fields = []
    for axis, plain in enumerate((y, x)):
        at = moved[:, axis, :, None, None]
        affine = at[:, 0] + right * (at[:, 1] - at[:, 0]) + down * (at[:, 2] - at[:, 0])
        fields.append(plain + affine + smooth[:, axis])
    return _sampled(images, *fields, border="reflection")


@_corruption
def pixelate(images: Tensor, strength: int, draws: Draws) -> Tensor:
    """Means of rectangles, enlarged again."""
    share = (0.95, 0.9, 0.85, 0.75, 0.65)[strength]
    size = images.shape[-2:]
    down, right = (_means(side, int(side * share)).to(images.device) for side in size)
    return F.interpolate(down @ images @ right.mT, size, mode="nearest-exact")


@_corruption
def jpeg(images: Tensor, strength: int, draws: Draws) -> Tensor:
    """JPEG's lossy compression."""
    from PIL import Image

    quality = (80, 65, 58, 50, 40)[strength]
    levels = (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    found = []
    for each in levels:
        stream = io.BytesIO()
        Image.fromarray(each if each.shape[2] == 3 else each[..., 0]).save(stream, "JPEG", quality=quality)
        found.append(np.asarray(Image.open(stream)).reshape(each.shape))
    return torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2).to(images.device).float() / 255


def blurred(images: Tensor, sigma: float, border: str = "reflect") -> Tensor:
    """Gaussian blur of [rows, channels, height, width], up to three deviations."""
    reach = min(math.ceil(3 * sigma), min(images.shape[-2:]) - 1)
    at = torch.arange(-reach, reach + 1, device=images.device, dtype=torch.float32)
    kernel = torch.exp(-at.square() / (2 * sigma**2))
    row = (kernel / kernel.sum())[None, None]
    return _filtered(_filtered(images, row, border), row.mT, border)


def _filtered(images: Tensor, kernel: Tensor, border: str = "reflect") -> Tensor:
    from kornia.filters import filter2d

    return filter2d(images, kernel, border)


def _means(side: int, cells: int) -> Tensor:
    """Weights that divide a side into cells, each the mean of the pixels whose centers are in it: fp32 [cells, side]."""
    cell = ((torch.arange(side, dtype=torch.float64) + 0.5) * cells / side).ceil() - 1
    member = (cell == torch.arange(cells)[:, None]).float()
    return member / member.sum(dim=1, keepdim=True)


def _unit(images: Tensor) -> float:
    """By how much the images are larger than those for which lengths are given."""
    return min(images.shape[-2:]) / SIDE


def _grey(images: Tensor) -> Tensor:
    """[rows, 1, height, width]."""
    from kornia.color import rgb_to_grayscale

    return images if images.shape[1] == 1 else rgb_to_grayscale(images)


def _plane(images: Tensor) -> tuple[Tensor, Tensor]:
    """The row and the column of each pixel: fp32 [height, width]."""
    sides = (torch.arange(side, device=images.device, dtype=torch.float32) for side in images.shape[-2:])
    y, x = torch.meshgrid(*sides, indexing="ij")
    return y, x


def _sampled(images: Tensor, y: Tensor, x: Tensor, border: str = "border") -> Tensor:
    """Images at positions [rows, height, width] in pixels, bilinear."""
    height, width = images.shape[-2:]
    grid = torch.stack([(2 * x + 1) / width - 1, (2 * y + 1) / height - 1], dim=-1)
    return F.grid_sample(images, grid.expand(len(images), -1, -1, -1), padding_mode=border, align_corners=False)


def _zoomed(images: Tensor, factor: float) -> Tensor:
    """Images enlarged around their centers."""
    (y, x), (height, width) = _plane(images), images.shape[-2:]
    middle = (height - 1) / 2, (width - 1) / 2
    return _sampled(images, (y - middle[0]) / factor + middle[0], (x - middle[1]) / factor + middle[1])


def _moved(images: Tensor, radius: int, sigma: float, angle: Tensor) -> Tensor:
    """A half Gaussian along a line from each pixel; angle: fp32 [rows]."""
    unit, (y, x) = _unit(images), _plane(images)
    steps = round(2 * radius * unit) + 1
    weights = np.exp(-0.5 * (np.arange(steps) / (sigma * unit)) ** 2)
    weights = weights[weights > 1e-3]
    down, right = angle.sin().view(-1, 1, 1), angle.cos().view(-1, 1, 1)
    total = sum(float(weight) * _sampled(images, y + step * down, x + step * right) for step, weight in enumerate(weights))
    assert isinstance(total, Tensor)
    return total / float(weights.sum())


def _clouds(images: Tensor, decay: float, draws: Draws) -> Tensor:
    """Cloud-like noise, [rows, 1, height, width], from 0 to 1: octaves of noise whose amplitudes fall by `decay`."""
    height, width = images.shape[-2:]
    total = images.new_zeros(len(images), 1, height, width)
    for octave in range(1, math.ceil(math.log2(max(height, width))) + 1):
        cells = 2**octave + 1
        noise = draws.uniform(1, cells, cells) * 2 - 1
        total = total + F.interpolate(noise, (height, width), mode="bilinear", align_corners=True) / decay**octave
    low, high = total.amin(dim=(1, 2, 3), keepdim=True), total.amax(dim=(1, 2, 3), keepdim=True)
    return (total - low) / (high - low)


def _poisson_quantiles(photons: int) -> Tensor:
    """Poisson numbers for each level: fp32 [256, 4096], the quantiles at the middles of 4,096 equal steps."""
    most = photons + 12 * math.ceil(math.sqrt(photons)) + 20
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, most + 1)))])  # of factorials
    steps = (np.arange(POISSON_STEPS) + 0.5) / POISSON_STEPS
    table = np.zeros((256, POISSON_STEPS), np.float32)
    for level in range(1, 256):
        rate = photons * level / 255
        below = np.cumsum(np.exp(np.arange(most + 1) * math.log(rate) - rate - logs))
        table[level] = np.searchsorted(below, steps)
    return torch.from_numpy(table)
