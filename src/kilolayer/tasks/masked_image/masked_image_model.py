"""A trained masked image model as a Python object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from kilolayer.data.given_images import GivenImage, given_images, is_one_image, stacked, unreadable
from kilolayer.data.image_masks import ImageMasks
from kilolayer.models.image_encoder import ImageEncoder
from kilolayer.runs.trained_run import TrainedRun, batched
from kilolayer.tasks.masked_image.code_vocabulary import CodeVocabulary
from kilolayer.tasks.masked_image.config import MaskedImageConfig
from kilolayer.tasks.masked_image.predict import reconstruct
from kilolayer.tasks.masked_image.task import masks_of, target_of


@dataclass(frozen=True)
class ReconstructedImage:
    """pixels, masked, filled: the image, what the model reads of it, and how it fills that, uint8 [height, width, channels].

    image: its path, or its number among those given. fault: why it could not be read; there are no pixels then.
    """

    image: str
    pixels: np.ndarray | None
    masked: np.ndarray | None
    filled: np.ndarray | None
    fault: str | None = None


class MaskedImageModel(TrainedRun):
    """A trained run of the task `masked_image`."""

    @property
    def config(self) -> MaskedImageConfig:
        """The run's complete configuration, with every default filled in."""
        return cast("MaskedImageConfig", super().config)

    def reconstruct(self, images: Any, *, seed: int = 0) -> ReconstructedImage | list[ReconstructedImage]:
        """Hide patches of an image, or of each of several, as in training, and let the model fill them.

        images: a path, an image of Pillow, or pixels, uint8 [height, width, channels] or [height, width]; or a list of these. A
        folder or an archive stands for all images in it. Images of another size are scaled and cropped as in training.
        seed: which masks are drawn, another for each image of a list. Codes are drawn by the tokenizer; predicted pixels are
        shown with the hidden patch's own mean and deviation. One image that cannot be read raises an error; among several, it
        has a `fault` instead of pixels.
        """
        masks, one = masks_of(self.config, seed), is_one_image(images)
        found = list(self._reconstructed([images] if one else images, masks))
        if one and found[0].fault is not None:
            raise unreadable(found[0].image, found[0].fault)
        return found[0] if one else found

    def _reconstructed(self, images: Any, masks: ImageMasks) -> Iterator[ReconstructedImage]:
        model, config, first = self.reader, self.config.images, 0
        assert isinstance(model, ImageEncoder)
        target = target_of(self.config, cast("CodeVocabulary | None", self.tokenizer))
        for some in batched(given_images(images, config.channels, config.sides), config.rows):
            pixels = stacked(some)
            read = len(pixels)
            keys = torch.stack([torch.arange(first, first + read), torch.zeros(read, dtype=torch.int64)], dim=1)
            shown = reconstruct(model, target, masks, pixels, keys) if read else ()
            rows = zip(*(each.permute(0, 2, 3, 1).numpy() for each in shown), strict=True)
            yield from (_row(each, rows) for each in some)
            first += read


def _row(given: GivenImage, rows: Iterator[tuple[np.ndarray, ...]]) -> ReconstructedImage:
    if given.fault is not None:
        return ReconstructedImage(given.name, None, None, None, given.fault)
    masked, filled = next(rows)
    return ReconstructedImage(given.name, given.pixels, masked, filled)
