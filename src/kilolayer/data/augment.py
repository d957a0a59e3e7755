"""Augmentation of a batch of images, on the device where they are.

What is drawn for an image depends on the seed, the image and the epoch alone, so that a resumed run continues like an
undisturbed one, and batches can be divided in any way; mixup and cutmix also depend on the other images of the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.config import bounded, check
from kilolayer.data.image_draws import beta, beta_quantiles, log_uniform, uniform
from kilolayer.data.images import normalized
from kilolayer.data.randaugment import COLORS, DRAWS, OPERATIONS, randaugment
from kilolayer.errors import OptionError, UnusedOptionError

TOP, LEFT, AREA, RATIO, FLIP, ERASED, ERASED_AREA, ERASED_RATIO, ERASED_TOP, ERASED_LEFT, ERASED_NOISE = range(11)
MIXED, KIND, SHARE, CUT_TOP, CUT_LEFT, PARTNER = range(11, 17)
OTHERS = 17
"""The numbers of the draws of an image. Those of RandAugment come last, as many as it has operations."""
IGNORED = 255
"""The id of pixels of label images that count for nothing."""
LEAST_ERASED, MOST_ERASED, MOST_ERASED_RATIO = 0.02, 1 / 3, 10 / 3
"""Shares of the area and the ratio of sides of an erased rectangle (Zhong et al. 2020)."""


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """`[augment]`: how training images are changed at random."""

    crop: Literal["pad", "resized", "none"] = "pad"
    """pad: shift the image by up to `pad` pixels, filling with black; resized: cut out a part and scale it to the size."""
    pad: int = bounded(4, least=1, most=1024)
    """Pixels of the largest shift, with crop = "pad"."""
    scale: float = bounded(0.08, above=0, most=1)
    """Smallest share of the image's area that is cut out, with crop = "resized"."""
    largest: float = bounded(1.0, above=0, most=16)
    """Largest share that is cut out, with crop = "resized". Above 1 the image becomes smaller, and its border is repeated."""
    ratio: float = bounded(4 / 3, least=1, most=100)
    """Largest ratio of the sides of what is cut out, with crop = "resized"."""
    flip: bool = True
    """Mirror half of the images, left to right."""
    randaugment: int = bounded(0, least=0, most=16)
    """Number of RandAugment's operations."""
    magnitude: float = bounded(9.0, least=0, most=10)
    """Strength of RandAugment's operations."""
    erasing: float = bounded(0.0, least=0, most=1)
    """Share of images in which a random rectangle is replaced by noise."""
    mixup: float = bounded(0.0, least=0, most=100)
    """Mix each image and its label with another of the batch, in shares drawn from Beta(mixup, mixup); 0: do not."""
    cutmix: float = bounded(0.0, least=0, most=100)
    """Replace a rectangle, a share drawn from Beta(cutmix, cutmix), by that of another image; with mixup, in half of them."""
    mixed: float = bounded(1.0, above=0, most=1)
    """Share of images to which mixup or cutmix is applied."""

    def __post_init__(self) -> None:
        check(self)
        needs = {
            "pad": (self.crop == "pad", 'crop = "pad"'),
            "scale": (self.crop == "resized", 'crop = "resized"'),
            "largest": (self.crop == "resized", 'crop = "resized"'),
            "ratio": (self.crop == "resized", 'crop = "resized"'),
            "magnitude": (self.randaugment > 0, "randaugment"),
            "mixed": (self.mixes, "mixup or cutmix"),
        }
        default = {each.name: each.default for each in fields(self)}
        for name, (used, needed) in needs.items():
            if not used and getattr(self, name) != default[name]:
                beside = ("crop",) if "crop" in needed else ("randaugment",) if name == "magnitude" else ("mixup", "cutmix")
                raise UnusedOptionError(
                    f"{name} has no effect without {needed}", fix=f"remove it, or set {needed}", unused=name, beside=beside
                )

        if self.scale > self.largest:
            raise OptionError(f"scale is {self.scale}, but largest is {self.largest}", fix="scale must not be above largest")

    @property
    def mixes(self) -> bool:
        """Whether labels are shares of classes."""
        return self.mixup > 0 or self.cutmix > 0


class Augment:
    """Changes batches of training images at random.

    classes: the number of classes, where labels are mixed.
    """

    def __init__(self, config: AugmentConfig, seed: int, classes: int | None = None) -> None:
        if config.mixes and classes is None:
            raise OptionError("mixup and cutmix need labels", where="augment", fix="remove them")
        self.config, self.seed, self.classes = config, seed, classes
        self.quantiles = {name: beta_quantiles(getattr(config, name)) for name in ("mixup", "cutmix") if getattr(config, name)}

    def __call__(self, pixels: Tensor, labels: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Augmented images, fp32 [rows, channels, height, width], normalized; and labels, as they were or as shares.

        pixels: uint8 [rows, channels, height, width]. labels: int64 [rows], -1 in rows that only fill up the batch, which must
        be the last ones; shares are fp32 [rows, classes], and 0 in those rows. keys: int64 [rows, 2], image and epoch.
        """
        draws = self.draws(keys)
        images = normalized(self.colored(self.moved(pixels, draws), draws))
        images = self.erased(images, draws)
        return self.mixed(images, labels, draws) if self.config.mixes else (images, labels)

    def draws(self, keys: Tensor) -> Tensor:
        """All draws of the images: fp32 [rows, draws]."""
        return uniform(self.seed, keys, OTHERS + DRAWS * self.config.randaugment)

    def moved(self, pixels: Tensor, draws: Tensor) -> Tensor:
        """Crop and flip: uint8 of the same shape."""
        rows, columns = coordinates(self.config, draws, *pixels.shape[-2:])
        return sampled(pixels, rows, columns) if self.config.crop == "resized" else gathered(pixels, rows, columns, 0)

    def colored(self, pixels: Tensor, draws: Tensor, operations: tuple[str, ...] = OPERATIONS) -> Tensor:
        """RandAugment: levels from 0 to 255."""
        if not self.config.randaugment:
            return pixels
        chosen = draws[:, OTHERS:].unflatten(1, (self.config.randaugment, DRAWS))
        return randaugment(pixels.float(), chosen, self.config.magnitude, operations)

    def erased(self, images: Tensor, draws: Tensor) -> Tensor:
        """Random erasing: noise of all levels in a rectangle of some images."""
        if not self.config.erasing:
            return images
        area = LEAST_ERASED + draws[:, ERASED_AREA] * (MOST_ERASED - LEAST_ERASED)
        ratio = log_uniform(draws[:, ERASED_RATIO], 1 / MOST_ERASED_RATIO, MOST_ERASED_RATIO)
        inside = _rectangle(images, (area * ratio).sqrt(), (area / ratio).sqrt(), draws[:, ERASED_TOP], draws[:, ERASED_LEFT])
        inside &= (draws[:, ERASED] < self.config.erasing).view(-1, 1, 1, 1)
        return torch.where(inside, self._noise(images, draws[:, ERASED_NOISE]), images)

    def _noise(self, images: Tensor, draws: Tensor) -> Tensor:
        """Noise from -1 to 1 in the shape of the images: one sequence, which each image reads from another place on."""
        count = images[0].numel()
        key = torch.zeros(1, 2, dtype=torch.int64, device=images.device)
        sequence = uniform(self.seed + 1, key, count)[0] * 2 - 1
        offsets = (draws * count).long()[:, None] + torch.arange(count, device=images.device)
        return sequence[offsets % count].view_as(images)

    def _share(self, draws: Tensor, name: str) -> Tensor:
        """The share of each image's own pixels in a mixture: fp32 [rows]."""
        self.quantiles[name] = self.quantiles[name].to(draws.device)  # once: a copy to the device waits for it
        return beta(draws[:, SHARE], self.quantiles[name])

    def mixed(self, images: Tensor, labels: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Mixup or cutmix of each image with another of the batch: images, and shares of the classes, fp32 [rows, classes]."""
        config, real = self.config, labels >= 0
        other = _partners(real, draws[:, PARTNER])
        chosen = real & (draws[:, MIXED] < config.mixed)
        cuts = draws[:, KIND] < (0.5 if config.mixup and config.cutmix else float(config.cutmix > 0))
        kept = torch.ones_like(draws[:, 0])
        theirs = images[other]
        found = images
        if config.mixup:
            share = self._share(draws, "mixup")
            kept = torch.where(chosen & ~cuts, share, kept)
            found = torch.lerp(theirs, images, kept.view(-1, 1, 1, 1))
        if config.cutmix:
            side = (1 - self._share(draws, "cutmix")).sqrt()
            inside = _rectangle(images, side, side, draws[:, CUT_TOP], draws[:, CUT_LEFT], cut_off=True)
            inside &= (chosen & cuts).view(-1, 1, 1, 1)
            found = torch.where(inside, theirs, found)
            kept = torch.where(cuts, 1 - inside.float().mean(dim=(1, 2, 3)), kept)
        assert self.classes is not None
        shares = (labels[:, None] == torch.arange(self.classes, device=labels.device)).float()
        shares = shares * kept[:, None] + shares[other] * (1 - kept)[:, None]
        return found, shares


class PairAugment(Augment):
    """Changes images and their label images at random: both are moved alike, and only the image changes its colors."""

    def __init__(self, config: AugmentConfig, seed: int) -> None:
        if config.mixes:
            raise OptionError("mixup and cutmix have no effect on label images", where="augment", fix="remove them")
        super().__init__(config, seed)

    def __call__(self, pixels: Tensor, labels: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Augmented images, fp32 [rows, channels, height, width], normalized; and ids, int64 [rows, height, width].

        pixels: uint8 [rows, channels, height, width]. labels: ids, uint8 [rows, height, width]. An id of 255 counts for
        nothing, and neither does what comes from beyond the border; in what is returned both are -1.
        """
        draws = self.draws(keys)
        rows, columns = coordinates(self.config, draws, *pixels.shape[-2:])
        ids = gathered(labels.unsqueeze(1), rows, columns, IGNORED)[:, 0].long()
        images = normalized(self.colored(self.moved(pixels, draws), draws, COLORS))
        return self.erased(images, draws), torch.where(ids == IGNORED, -1, ids)


def coordinates(config: AugmentConfig, draws: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Where each row and each column of the result comes from: fp32 [rows, height] and [rows, width], in pixels."""
    y, x = (torch.arange(side, device=draws.device, dtype=torch.float32) for side in (height, width))
    if config.crop == "pad":
        down, right = ((draws[:, each, None] * (2 * config.pad + 1)).floor() - config.pad for each in (TOP, LEFT))
        rows, columns = y + down, x + right
    elif config.crop == "resized":
        area = config.scale + draws[:, AREA, None] * (config.largest - config.scale)
        ratio = log_uniform(draws[:, RATIO, None], 1 / config.ratio, config.ratio)
        tall, wide = ((area * each).sqrt().clamp(max=max(1, math.sqrt(config.largest))) for each in (ratio, 1 / ratio))
        rows = ((y + 0.5) * tall + draws[:, TOP, None] * (1 - tall) * height) - 0.5
        columns = ((x + 0.5) * wide + draws[:, LEFT, None] * (1 - wide) * width) - 0.5
    else:
        rows, columns = (each.expand(len(draws), -1) for each in (y, x))
    if config.flip:
        columns = torch.where(draws[:, FLIP, None] < 0.5, columns.flip(1), columns)
    return rows, columns


def gathered(pixels: Tensor, rows: Tensor, columns: Tensor, outside: int) -> Tensor:
    """The nearest pixels: [rows, channels, height, width]; `outside` where there are none."""
    height, width = pixels.shape[-2:]
    y, x = rows.round().long(), columns.round().long()
    there = ((y >= 0) & (y < height))[:, :, None] & ((x >= 0) & (x < width))[:, None, :]
    batch = torch.arange(len(pixels), device=pixels.device)[:, None, None]
    found = pixels[batch, :, y.clamp(0, height - 1)[:, :, None], x.clamp(0, width - 1)[:, None, :]]
    return torch.where(there[..., None], found, outside).permute(0, 3, 1, 2).contiguous().to(pixels.dtype)


def sampled(pixels: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Bilinear: uint8 [rows, channels, height, width]; beyond the border the border is repeated."""
    height, width = pixels.shape[-2:]
    y, x = (2 * rows + 1) / height - 1, (2 * columns + 1) / width - 1
    grid = torch.stack([x[:, None, :].expand(-1, y.shape[1], -1), y[:, :, None].expand(-1, -1, x.shape[1])], dim=-1)
    found = F.grid_sample(pixels.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    return found.round().clamp(0, 255).to(torch.uint8)


def _rectangle(images: Tensor, tall: Tensor, wide: Tensor, top: Tensor, left: Tensor, *, cut_off: bool = False) -> Tensor:
    """bool [rows, 1, height, width]: rectangles whose sides are shares of the image's, at drawn places.

    cut_off: a rectangle's center is anywhere, and what is beyond the border is cut off; otherwise it is inside.
    """
    inside = torch.ones((), dtype=torch.bool, device=images.device)
    for axis, share, place in ((2, tall, top), (3, wide, left)):
        side = images.shape[axis]
        size = (share * side).round().clamp(max=side)
        start = (place * side).floor() - (size / 2).floor() if cut_off else (place * (side - size + 1)).floor()
        at = torch.arange(side, device=images.device)
        here = (at >= start[:, None]) & (at < (start + size)[:, None])
        inside = inside & here.view(-1, 1, *((side, 1) if axis == 2 else (1, side)))
    return inside


def _partners(real: Tensor, draws: Tensor) -> Tensor:
    """int64 [rows]: another real row for each, the same distance away for all; rows that fill up the batch keep their own."""
    rows, count = torch.arange(len(real), device=real.device), real.sum()
    distance = 1 + (draws[0] * (count - 1)).long().clamp(max=count - 2).clamp(min=0)
    return torch.where(real, (rows + distance) % count.clamp(min=1), rows)
