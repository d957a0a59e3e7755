"""Segmentation of images: an encoder of patches with a map head, a class for each pixel."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from kilolayer import hints
from kilolayer.data.augment import IGNORED, PairAugment
from kilolayer.data.drawn_images import SHAPES, data_notes, given_or_drawn
from kilolayer.data.frequencies import frequency_loss
from kilolayer.data.held_out import HeldOut
from kilolayer.data.image_batches import batch_of
from kilolayer.data.image_pairs import ImagePairs, ImagePairsConfig, PairBatches, PairParts, find_pairs, read_pairs
from kilolayer.data.overlays import overlay
from kilolayer.errors import OptionError
from kilolayer.evaluate.segmentation import Segmentation, classes_of, measure_pixels, pixel_scores
from kilolayer.models.encoder import Encoder
from kilolayer.models.map_head import MapHead
from kilolayer.runtime.recorder import Recorder
from kilolayer.tasks import registry
from kilolayer.tasks.image_body import adopted
from kilolayer.tasks.other_text import OtherText
from kilolayer.tasks.results import VALIDATION, write_results
from kilolayer.tasks.segment.config import SegmentConfig
from kilolayer.tasks.task import Loss, Task

IOU, OVERLAYS = "iou_by_class", "overlays"
"""Keys of scores.json: the IoU of each class, and a picture of a few images."""
SHOWN, WIDEST = 6, 280
"""Images in the report, and the largest side of each in pixels."""


class SegmentTask(Task[SegmentConfig]):
    """The images of a run with their label images, ready for training, validation and testing."""

    starts_from: ClassVar[tuple[str, ...]] = ("masked_image", "classify_image")
    records_on_device: ClassVar[bool] = True

    def __init__(self, parts: PairParts, config: SegmentConfig) -> None:
        self.config, self.classes, self.rows = config, parts.classes, config.images.rows
        self.train, self.valid, self.test = parts.train, parts.valid, parts.test
        self.notes = data_notes(config.images, parts.notes)
        self.augment = PairAugment(config.augment, config.train.seed)
        given = config.model.map_head
        if given is not None and given.classes not in (len(self.classes), MapHead.classes):
            raise OptionError(
                f"classes is {given.classes}, but there are {len(self.classes)} classes",
                where="model.map_head",
                fix="remove model.map_head.classes",
            )

    @classmethod
    def prepare(cls, config: SegmentConfig, cache: Path, vocabulary: None = None) -> SegmentTask:
        return cls(find_pairs(_given_or_drawn(config.images, cache), cache), config)

    @classmethod
    def read_text(
        cls, config: SegmentConfig, vocabulary: None, text: OtherText, cache: Path
    ) -> Callable[[Any], dict[str, Any]]:
        """Read other images, and their label images, of the same classes."""
        title = registry.get(config.task).title
        files = text.files(title)
        if len(files) != 2:
            raise OptionError(
                f"{title} is scored on images and their label images",
                where=hints.argument("test"),
                fix="name two folders: that of the images, then that of the label images",
            )
        images = read_pairs(*files, config.images, cache)

        def score(model: Any) -> dict[str, Any]:
            found = measure_pixels(model, images, config.images.rows)
            return {"test": _score_table(found), IOU: _by_class(images.classes, found)}

        return score

    def resolve(self, config: SegmentConfig) -> SegmentConfig:
        """The configuration with the names of the classes, a score for each, and absolute paths."""
        assert config.model.map_head is not None
        head = replace(config.model.map_head, classes=len(self.classes))
        images = replace(config.images, classes=list(self.classes), **config.images.absolute())
        return replace(config, model=replace(config.model, map_head=head), images=images)

    def adopt(self, weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The body of another model that reads images; also its map head, if it has the same form and as many classes."""
        return adopted(weights, own, "map_head.")

    def training_batches(self, seed: int) -> PairBatches:
        """Endless shuffled batches of the training images."""
        return PairBatches(self.train, self.rows, seed)

    def on_device(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Augmented images, fp32 [rows, channels, height, width], classes, int64 [rows, height, width], and a weight, [].

        The weight is the number of pixels with a class before augmentation, which may move some of them out of the image.
        """
        pixels, ids, keys = parts
        images, labels = self.augment(pixels, ids, keys)
        return images, labels, (ids != IGNORED).sum()

    def loss(self, model: Encoder, parts: Sequence[Tensor], *, hidden_states: bool) -> Loss:
        """The mean cross-entropy of the pixels that have a class, times the batch's weight; parts: what `on_device` returns."""
        images, labels, weight = parts
        output = model(images, hidden_states=hidden_states)  # pyright: ignore[reportCallIssue]
        assert output.logits is not None
        log_probabilities = F.log_softmax(output.logits.float(), dim=1)
        output = replace(output, logits=None)  # they are large, and not needed for the backward pass
        real = labels >= 0
        share = weight / real.sum().clamp(min=1)

        def total(of_pixels: Tensor) -> Tensor:
            return -of_pixels.masked_fill(~real, 0.0).sum() * share

        nll = total(log_probabilities.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1))
        smoothing = self.config.train.label_smoothing
        if not smoothing:
            return Loss(nll, nll, weight, output)
        return Loss((1 - smoothing) * nll + smoothing * total(log_probabilities.mean(dim=1)), nll, weight, output)

    def model_inputs(self, parts: Sequence[Tensor]) -> dict[str, Tensor]:
        images, labels, _ = parts
        return {"images": images[(labels >= 0).flatten(1).any(dim=1)]}

    def held_out(self) -> HeldOut:
        return HeldOut(*(None if part is None else part.digest for part in (self.valid, self.test)))

    def frequency_loss(self) -> float:
        return frequency_loss(self.train.pixel_counts)

    def validate(self, model: Encoder, most: int, recorder: Recorder | None = None) -> Segmentation | None:
        """The loss and the mean IoU on at most `most` validation images; None if there are none."""
        return None if self.valid is None else measure_pixels(model, self.valid, self.rows, most, recorder)

    def score(self, model: Encoder, folder: Path, weights: Mapping[str, Any] | None = None) -> None:
        """Write the scores of the test images, or of the validation images if there are none, into a run folder."""
        images, shown = self.test or self.valid, self.valid or self.test
        if images is None or shown is None:
            write_results(folder, [], {}, weights)
            return
        found = measure_pixels(model, images, self.rows)
        tables = {"test" if self.test is not None else VALIDATION: _score_table(found)}
        write_results(folder, [], tables | {IOU: _by_class(self.classes, found), OVERLAYS: _picture(model, shown)}, weights)


def _given_or_drawn(config: ImagePairsConfig, cache: Path) -> ImagePairsConfig:
    found = given_or_drawn(config, cache)
    assert isinstance(found, ImagePairsConfig)
    drawn = config.train is None and not config.classes
    return replace(found, classes=["background", *SHAPES]) if drawn else found


def _by_class(classes: Sequence[str], found: Segmentation) -> list[dict[str, Any]]:
    """The IoU of each class."""
    return [{"name": name, **asdict(iou)} for name, iou in zip(classes, found.by_class(), strict=True)]


def _score_table(found: Segmentation) -> dict[str, Any]:
    return {key: asdict(score) for key, score in found.scores().items()}


def _picture(model: Encoder, images: ImagePairs) -> str:
    """A JPEG file in base64: images from all over the set, each beside its true classes and the predicted ones."""
    from PIL import Image

    chosen = np.unique(np.linspace(0, len(images) - 1, SHOWN).astype(np.int64))
    found = classes_of(pixel_scores(model, batch_of(images, chosen, len(chosen)).pixels))
    rows = []
    for index, ids in zip(chosen, found, strict=True):
        pixels, labels = images[index]
        columns = (overlay(pixels, each, len(images.classes)) for each in (np.full_like(labels, IGNORED), labels, ids))
        rows.append(np.concatenate(list(columns), axis=1))
    whole = Image.fromarray(np.concatenate(rows))
    scale = min(1.0, WIDEST / max(images.pixels.shape[1:3]))
    small = whole.resize((round(whole.width * scale), round(whole.height * scale)), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    small.save(file, "JPEG", quality=90, subsampling=0)
    return base64.b64encode(file.getvalue()).decode()
