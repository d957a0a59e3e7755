"""Classification of images: an encoder of patches with a head, a class for each image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from kilolayer.data.all_over import members_all_over
from kilolayer.data.augment import Augment
from kilolayer.data.drawn_images import data_notes, given_or_drawn
from kilolayer.data.frequencies import frequency_loss
from kilolayer.data.held_out import HeldOut
from kilolayer.data.image_batches import ImageBatches
from kilolayer.data.image_set import ImageSet
from kilolayer.data.image_uri import data_uri
from kilolayer.data.images import ImageParts, find_images, read_images
from kilolayer.errors import OptionError
from kilolayer.evaluate.image_labels import ImageScores, measure_images, predict_images
from kilolayer.evaluate.predictions import probabilities
from kilolayer.models.encoder import Encoder
from kilolayer.models.head import Head
from kilolayer.runtime.recorder import Recorder
from kilolayer.tasks import registry
from kilolayer.tasks.classify_image.config import ClassifyImageConfig
from kilolayer.tasks.image_body import adopted
from kilolayer.tasks.other_text import OtherText
from kilolayer.tasks.results import VALIDATION, write_results
from kilolayer.tasks.task import Loss, Task

SAMPLES = 12
"""Images in the report that are right, and that are wrong."""
CONFUSION, CLASSES = "confusion", "classes"
"""Keys of scores.json: counts [class, predicted class], and the names of the classes."""


class ClassifyImageTask(Task[ClassifyImageConfig]):
    """The images of a run, ready for training, validation and testing."""

    starts_from: ClassVar[tuple[str, ...]] = ("masked_image", "segment")
    records_on_device: ClassVar[bool] = True

    def __init__(self, parts: ImageParts, config: ClassifyImageConfig) -> None:
        self.config, self.classes, self.rows = config, parts.classes, config.images.rows
        self.train, self.valid, self.test = parts.train, parts.valid, parts.test
        self.notes = data_notes(config.images, parts.notes)
        self.augment = Augment(config.augment, config.train.seed, len(self.classes))
        given = config.model.head
        if given is not None and given.outputs not in (len(self.classes), Head.outputs):
            raise OptionError(
                f"outputs is {given.outputs}, but there are {len(self.classes)} classes",
                where="model.head",
                fix="remove model.head.outputs",
            )

    @classmethod
    def prepare(cls, config: ClassifyImageConfig, cache: Path, vocabulary: None = None) -> ClassifyImageTask:
        return cls(find_images(given_or_drawn(config.images, cache), cache), config)

    @classmethod
    def read_text(
        cls, config: ClassifyImageConfig, vocabulary: None, text: OtherText, cache: Path
    ) -> Callable[[Any], dict[str, Any]]:
        """Read other images of the same classes."""
        title = registry.get(config.task).title
        source = text.one(title, "folder")
        images = read_images(source, config.images, cache)

        def score(model: Any) -> dict[str, Any]:
            scores = measured(model, images, config.images.rows)
            return {"test": _score_table(scores), **_details(images.classes, scores)}

        return score

    def resolve(self, config: ClassifyImageConfig) -> ClassifyImageConfig:
        """The configuration with the classes in order, one output for each, and absolute paths."""
        assert config.model.head is not None
        head = replace(config.model.head, outputs=len(self.classes))
        images = replace(config.images, classes=list(self.classes), **config.images.absolute())
        return replace(config, model=replace(config.model, head=head), images=images)

    def adopt(self, weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The body of another model that reads images; also its head, if it has as many classes."""
        return adopted(weights, own, "head.")

    def training_batches(self, seed: int) -> ImageBatches:
        """Endless shuffled batches of the training images."""
        return ImageBatches(self.train, self.rows, seed)

    def on_device(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Augmented images, fp32 [rows, channels, height, width], and labels: int64 [rows], or shares, fp32 [rows, classes]."""
        pixels, labels, keys = parts
        return self.augment(pixels, labels, keys)

    def loss(self, model: Encoder, parts: Sequence[Tensor], *, hidden_states: bool) -> Loss:
        """Cross-entropy of the classes, or of shares of them; parts: what `on_device` returns.

        Rows that only fill up the batch, with the label -1 or without any share, are not counted.
        """
        images, labels = parts
        output = model(images, hidden_states=hidden_states)  # pyright: ignore[reportCallIssue]
        assert output.logits is not None
        log_probabilities = F.log_softmax(output.logits.float(), dim=-1)
        shares, real = shares_of(labels, log_probabilities.shape[-1])
        smoothing = self.config.train.label_smoothing
        nll = -(shares * log_probabilities).sum()
        spread = -log_probabilities.mean(dim=-1).masked_fill(~real, 0.0).sum()
        return Loss((1 - smoothing) * nll + smoothing * spread, nll, real.sum(), output)

    def model_inputs(self, parts: Sequence[Tensor]) -> dict[str, Tensor]:
        images, labels = parts
        return {"images": images[shares_of(labels, len(self.classes))[1]]}

    def held_out(self) -> HeldOut:
        return HeldOut(*(None if part is None else part.digest for part in (self.valid, self.test)))

    def frequency_loss(self) -> float:
        assert self.train.labels is not None
        return frequency_loss(np.bincount(self.train.labels))

    def validate(self, model: Encoder, most: int, recorder: Recorder | None = None) -> ImageScores | None:
        """The loss and accuracy on at most `most` validation images; None if there are none."""
        return None if self.valid is None else measured(model, self.valid, self.rows, most, recorder)

    def score(self, model: Encoder, folder: Path, weights: Mapping[str, Any] | None = None) -> None:
        """Write the scores of the test images, or of the validation images if there are none, into a run folder."""
        images = self.test or self.valid
        if images is None:
            write_results(folder, [], {}, weights)
            return
        assert images.labels is not None
        found = predict_images(model, images, self.rows)
        scores = measure_images(found, images.labels)
        tables = {"test" if self.test is not None else VALIDATION: _score_table(scores)}
        write_results(folder, samples_of(images, found), tables | _details(self.classes, scores), weights)


def samples_of(images: ImageSet, scores: np.ndarray) -> list[dict[str, str]]:
    """A few images with their predictions, right and wrong by turns: those from all over the set, and the surest mistakes."""
    assert images.labels is not None
    found, shares = scores.argmax(axis=1), probabilities(scores).max(axis=1)
    right, wrong = np.flatnonzero(found == images.labels), np.flatnonzero(found != images.labels)
    spread = right[np.unique(np.linspace(0, len(right) - 1, SAMPLES).astype(np.int64))] if len(right) else right
    surest = wrong[np.argsort(-shares[wrong], kind="stable")][:SAMPLES]
    turns = [index for pair in zip_longest(spread.tolist(), surest.tolist()) for index in pair if index is not None]
    return [
        {
            "image": data_uri(images.pixels[index]),
            "name": images.names[index],
            "label": images.classes[images.labels[index]],
            "prediction": f"{images.classes[found[index]]}, {shares[index]:.1%}",
        }
        for index in turns
    ]


def shares_of(labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Labels as shares of the classes, fp32 [rows, classes], and which rows have one, bool [rows].

    labels: int64 [rows], -1 where there is none; or already shares, 0 where there are none.
    """
    if labels.is_floating_point():
        return labels, labels.sum(dim=-1) > 0
    real = labels >= 0
    return F.one_hot(labels.clamp(min=0), classes).float() * real[:, None], real


def measured(
    model: Encoder, images: ImageSet, rows: int, most: int | None = None, recorder: Recorder | None = None
) -> ImageScores:
    """The scores of a model on labelled images."""
    assert images.labels is not None
    found = predict_images(model, images, rows, most, recorder)
    return measure_images(found, images.labels[members_all_over(len(images), most)])


def _details(classes: Sequence[str], scores: ImageScores) -> dict[str, Any]:
    """What scores.json says of single classes."""
    return {CLASSES: list(classes), CONFUSION: scores.confusion.tolist()}


def _score_table(scores: ImageScores) -> dict[str, Any]:
    return {key: asdict(score) for key, score in scores.scores().items()}
