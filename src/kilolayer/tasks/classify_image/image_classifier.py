"""A trained image classifier as a Python object."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from os import PathLike, fsdecode
from typing import Any, cast

import numpy as np
import torch

from kilolayer import hints
from kilolayer.data.drawn_images import given_or_drawn
from kilolayer.data.given_images import GivenImage, given_images, is_one_image, stacked, unreadable
from kilolayer.data.image_set import ImageSet
from kilolayer.data.images import find_images, normalized, read_images
from kilolayer.errors import InputError
from kilolayer.evaluate.predictions import probabilities
from kilolayer.evaluate.robustness import Robustness, measure_robustness
from kilolayer.models.encoder import Encoder
from kilolayer.runs.run import cache_folder
from kilolayer.runs.trained_run import TrainedRun, batched
from kilolayer.tasks.classify_image.config import ClassifyImageConfig


@dataclass(frozen=True)
class ImagePrediction:
    """The class of an image, and the probability of every class, the most probable first.

    image: its path, or its number among those given. fault: why it could not be read; there is no class then.
    """

    image: str
    label: str | None
    probabilities: dict[str, float]
    fault: str | None = None


class ImageClassifier(TrainedRun):
    """A trained run of the task `classify_image`."""

    @property
    def config(self) -> ClassifyImageConfig:
        """The run's complete configuration, with every default filled in."""
        return cast("ClassifyImageConfig", super().config)

    def classify(self, images: Any) -> ImagePrediction | list[ImagePrediction]:
        """The class and the probabilities of an image, or of each of several, in order.

        images: a path, an image of Pillow, or pixels, uint8 [height, width, channels] or [height, width]; or a list of these. A
        folder or an archive stands for all images in it. Images of another size are scaled and cropped as in training.
        One image that cannot be read raises an error; among several, its prediction has a `fault` instead of a class.
        """
        if not is_one_image(images):
            return list(self.classifications(images))
        (found,) = self.classifications([images])
        if found.fault is not None:
            raise unreadable(found.image, found.fault)
        return found

    def classifications(self, images: Any) -> Iterator[ImagePrediction]:
        """Yield the predictions for many images, a batch of which is read ahead; those of `classify` for a list."""
        config = self.config.images
        given = given_images(images, config.channels, config.sides)
        return (each for some in batched(given, config.rows) for each in self._classify(some))

    def corruptions(
        self,
        test: str | PathLike[str] | None = None,
        *,
        most: int | None = None,
        seed: int = 0,
        show: Callable[[str], None] | None = None,
    ) -> Robustness:
        """Errors on corrupted images: fifteen corruptions at five strengths, and sketches. Same seed, same numbers.

        test: a folder of images by class, instead of the run's own test (or else validation) images. most: only so many images,
        from all over the set. show: called with the name of what is measured next.
        """
        model = self.reader
        assert isinstance(model, Encoder)
        return measure_robustness(model, self._test_images(test), self.config.images.rows, most=most, seed=seed, show=show)

    def _test_images(self, test: str | PathLike[str] | None) -> ImageSet:
        config = self.config.images
        if (source := config.test if test is None else fsdecode(test)) is not None:
            return read_images(source, config, cache_folder())
        parts = find_images(given_or_drawn(config, cache_folder()), cache_folder())
        images = parts.test or parts.valid
        if images is None:
            raise InputError(
                "the run has no test images", where=str(self.folder), fix=f"name a folder of them: {hints.argument('test')}"
            )
        return images

    @torch.inference_mode()
    def _classify(self, images: list[GivenImage]) -> list[ImagePrediction]:
        pixels = stacked(images).to(self.device)
        rows = iter(probabilities(self.reader(normalized(pixels)).logits.float().cpu().numpy()) if len(pixels) else ())
        return [
            ImagePrediction(each.name, None, {}, each.fault)
            if each.fault is not None
            else self._prediction(each.name, next(rows))
            for each in images
        ]

    def _prediction(self, name: str, shares: np.ndarray) -> ImagePrediction:
        classes = self.config.images.classes
        ranked = {classes[index]: float(shares[index]) for index in np.argsort(-shares, kind="stable")}
        return ImagePrediction(name, next(iter(ranked)), ranked)
