"""A trained segmentation model as a Python object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from kilolayer.data.given_images import GivenImage, given_images, is_one_image, unreadable
from kilolayer.data.overlays import overlay
from kilolayer.models.encoder import Encoder
from kilolayer.runs.trained_run import TrainedRun, batched
from kilolayer.tasks.segment.config import SegmentConfig
from kilolayer.tasks.segment.tiles import segment_tiled


@dataclass(frozen=True)
class SegmentedImage:
    """The class of each pixel of an image.

    image: its path, or its number among those given. classes: their names. ids: uint8 [height, width], which of them each pixel
    has. pixels: the image, uint8 [height, width, channels]. fault: why it could not be read; there are no pixels then.
    """

    image: str
    classes: tuple[str, ...]
    ids: np.ndarray
    pixels: np.ndarray
    fault: str | None = None

    @property
    def shares(self) -> dict[str, float]:
        """The share of each class in the image, the largest first; classes that it does not have are left out."""
        counts = np.bincount(self.ids.ravel(), minlength=len(self.classes))
        order = [index for index in np.argsort(-counts, kind="stable") if counts[index]]
        return {self.classes[index]: float(counts[index] / self.ids.size) for index in order}

    def overlay(self, share: float = 0.6) -> np.ndarray:
        """The image with the color of each pixel's class: uint8 [height, width, 3]. share: of the color."""
        return overlay(self.pixels, self.ids, len(self.classes), share)


class Segmenter(TrainedRun):
    """A trained run of the task `segment`."""

    @property
    def config(self) -> SegmentConfig:
        """The run's complete configuration, with every default filled in."""
        return cast("SegmentConfig", super().config)

    def segment(self, images: Any) -> SegmentedImage | list[SegmentedImage]:
        """The class of each pixel of an image, or of each of several, in order.

        images: a path, an image of Pillow, or pixels, uint8 [height, width, channels] or [height, width]; or a list of these. A
        folder or an archive stands for all images in it. The answer has the size of the image, which the model reads at the
        size of the run's images, in overlapping tiles if it has another ratio of sides.
        One image that cannot be read raises an error; among several, it has a `fault` instead of pixels.
        """
        if not is_one_image(images):
            return list(self.segmentations(images))
        (found,) = self.segmentations([images])
        if found.fault is not None:
            raise unreadable(found.image, found.fault)
        return found

    def segmentations(self, images: Any) -> Iterator[SegmentedImage]:
        """Yield the answers for many images, a batch of which is read ahead; those of `segment` for a list."""
        config = self.config.images
        given = given_images(images, config.channels)
        return (each for some in batched(given, config.rows) for each in self._segment(some))

    def _segment(self, images: list[GivenImage]) -> list[SegmentedImage]:
        model, config = self.reader, self.config.images
        assert isinstance(model, Encoder)
        readable = [each.pixels for each in images if each.pixels is not None]
        maps = iter(segment_tiled(model, readable, config.sides, config.rows))
        classes, empty = tuple(self.config.images.classes), np.zeros((0, 0), np.uint8)
        return [
            SegmentedImage(each.name, classes, empty, empty[..., None], each.fault)
            if each.pixels is None
            else SegmentedImage(each.name, classes, next(maps), each.pixels)
            for each in images
        ]
