"""A trained image classifier as a Python object."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from os import PathLike, fsdecode
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from kilolayer.data.drawn_images import given_or_drawn
from kilolayer.data.image_decoding import LEFT_OUT, SUFFIXES, decode, require_vision
from kilolayer.data.image_set import ImageSet
from kilolayer.data.image_source import LARGEST, ImageSource
from kilolayer.data.images import find_images, normalized, read_images
from kilolayer.errors import InputError, KilolayerError, shown
from kilolayer.evaluate.predictions import probabilities
from kilolayer.evaluate.robustness import Robustness, measure_robustness
from kilolayer.files.paths import kind_of
from kilolayer.files.reading import read_bytes
from kilolayer.models.encoder import Encoder
from kilolayer.runs.run import cache_folder
from kilolayer.runs.trained_run import TrainedRun, batched
from kilolayer.tasks.classify_image.config import ClassifyImageConfig

Found = tuple[str, bytes | str]
"""The name of an image, and its file; or why there is none."""


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
        if not _is_one(images):
            return list(self.classifications(images))
        (found,) = self.classifications([images])
        if found.fault is not None:
            raise InputError(found.fault, where=found.image, fix="give an image that Pillow can read")
        return found

    def classifications(self, images: Any) -> Iterator[ImagePrediction]:
        """Yield the predictions for many images, a batch of which is read ahead; those of `classify` for a list."""
        require_vision()
        listed: Iterable[Any] = [images] if isinstance(images, str | PathLike) else images
        files = (found for number, each in enumerate(listed, 1) for found in files_of(each, number))
        return (each for some in batched(files, self.config.images.rows) for each in self._classify(some))

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
        if test is not None:
            return read_images(fsdecode(test), self.config.images, cache_folder())
        parts = find_images(given_or_drawn(self.config.images, cache_folder()), cache_folder())
        images = parts.test or parts.valid
        if images is None:
            raise InputError("the run has no test images", where=str(self.folder), fix="name a folder of them: test")
        return images

    @torch.inference_mode()
    def _classify(self, files: list[Found]) -> list[ImagePrediction]:
        config = self.config.images
        decoded = [_decoded(data, (*config.sides, config.channels)) for _, data in files]
        pixels = [each for each in decoded if not isinstance(each, str)]
        rows = iter(())
        if pixels:
            stacked = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).to(self.device)
            rows = iter(probabilities(self.reader(normalized(stacked)).logits.float().cpu().numpy()))
        return [
            ImagePrediction(name, None, {}, each) if isinstance(each, str) else self._prediction(name, next(rows))
            for (name, _), each in zip(files, decoded, strict=True)
        ]

    def _prediction(self, name: str, shares: np.ndarray) -> ImagePrediction:
        classes = self.config.images.classes
        ranked = {classes[index]: float(shares[index]) for index in np.argsort(-shares, kind="stable")}
        return ImagePrediction(name, next(iter(ranked)), ranked)


def files_of(source: Any, number: int) -> Iterator[Found]:
    """The image files that a source stands for: itself, or those in a folder or an archive; number: among the sources."""
    if not isinstance(source, str | PathLike):
        yield f"image {number}", _file_of(source, number)
        return
    path = fsdecode(source)
    try:
        if kind_of(Path(path)) == "folder" or ImageSource.parse(path).is_archive:
            yield from _files_below(path)
        else:
            yield path, read_bytes(Path(path), LARGEST)
    except KilolayerError as error:
        yield path, error.what


def _files_below(path: str) -> Iterator[Found]:
    source, joint, found = ImageSource.parse(path), "/" if kind_of(Path(path)) == "folder" else ":", False
    for entry in source.entries():
        if entry.data is not None and entry.name.lower().endswith(SUFFIXES):
            found = True
            yield f"{path.rstrip('/')}{joint if not source.inner else '/'}{entry.name}", entry.data
    if not found:
        yield path, "there is no image here"


def _file_of(image: Any, number: int) -> bytes:
    """An image of Pillow, or pixels, as the bytes of a file without loss."""
    from PIL import Image

    if isinstance(image, torch.Tensor):
        image = image.numpy(force=True)
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim in (2, 3):
        image = Image.fromarray(image[..., 0] if image.ndim == 3 and image.shape[2] == 1 else image)
    if not isinstance(image, Image.Image):
        raise InputError(
            f"this is {f'{image.dtype} of shape {list(image.shape)}' if isinstance(image, np.ndarray) else shown(image)}",
            where=f"image {number}",
            fix="give a path, an image of Pillow, or pixels: uint8 [height, width, channels]",
        )
    buffer = io.BytesIO()
    of_png = image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16") else image.convert("RGB")
    of_png.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _decoded(data: bytes | str, shape: tuple[int, int, int]) -> np.ndarray | str:
    """The pixels, uint8 [height, width, channels]; or why there are none."""
    if isinstance(data, str):
        return data
    pixels, reasons = decode(data, *shape)
    return LEFT_OUT[reasons[0]].partition(":")[0] if pixels is None else pixels


def _is_one(images: Any) -> bool:
    """Whether this is one image: a path of a file, an image of Pillow, or pixels."""
    if isinstance(images, str | PathLike):
        return kind_of(Path(fsdecode(images))) != "folder" and not ImageSource.parse(fsdecode(images)).is_archive
    return hasattr(images, "shape") or not isinstance(images, Iterable)
