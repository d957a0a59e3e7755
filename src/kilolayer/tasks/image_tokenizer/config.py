"""The configuration of a run of an image tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kilolayer.config import Table
from kilolayer.data.augment import AugmentConfig
from kilolayer.data.images import ImagesConfig, height_and_width
from kilolayer.models.image_tokenizer_config import ImageTokenizerConfig
from kilolayer.tasks.config import Fault, RunConfig, UsualBatch
from kilolayer.tasks.resume_rules import OTHER_BATCHES, ResumeRules

TRAINING: Table = {"schedule": "cosine", "lr": 1e-3, "clip_norm": 1.0, "label_smoothing": 0.0, "valid_sentences": 10**9}
OPTIMIZER: Table = {"optimizer": "adamw", "beta2": 0.99}
EPOCHS, WARMUP = 50, 0.05
NOT_OF_TOKENIZERS = ("mixup", "cutmix", "erasing")
"""Augmentation that makes images which are not to be reconstructed."""


@dataclass(frozen=True, kw_only=True)
class ImageTokenizerRunConfig(RunConfig):
    """Everything that a run of an image tokenizer is made from."""

    resume: ClassVar[ResumeRules] = ResumeRules(
        files=("images.train", "images.valid", "images.test"),
        breaks={"images": OTHER_BATCHES, "augment": "the images of the steps so far were changed differently"},
    )

    task: str = "image_tokenizer"
    """What is learned."""
    model: ImageTokenizerConfig = field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default_factory=ImageTokenizerConfig
    )
    """Encoder, decoder and codebook."""
    images: ImagesConfig = field(default_factory=ImagesConfig)
    """Images in folders, whose names have no meaning. Without images.train, drawn shapes."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    """How training images are changed at random."""

    @classmethod
    def defaults(cls, table: Mapping[str, Any]) -> Table:
        train, images = (_part(table, name) for name in ("train", "images"))
        own = {**TRAINING, **({} if "optimizer" in train else OPTIMIZER)}
        own |= {} if "steps" in train else {"epochs": EPOCHS}
        own |= {} if "warmup_steps" in train else {"warmup_share": WARMUP}
        model: Table = {"channels": images.get("channels", ImagesConfig.channels)}
        size = images.get("size", ImagesConfig.size)
        if isinstance(size, int | str) and not isinstance(size, bool):
            model["height"], model["width"] = height_and_width(size)
        return {"model": model, "train": own}

    def faults(self) -> Iterator[Fault]:
        model, images = self.model, self.images
        yield (
            (*model.sides, model.channels) != (*images.sides, images.channels),
            f"the model reads images of {_form(model.sides, model.channels)}, but [images] has "
            + _form(images.sides, images.channels),
            "model",
            "remove height, width and channels: those of [images] are taken",
        )
        yield bool(images.classes), "classes have no effect on an image tokenizer", "images", "remove them"
        for name in NOT_OF_TOKENIZERS:
            yield (
                bool(getattr(self.augment, name)),
                f"{name} would make images that a tokenizer is not meant to reconstruct",
                "augment",
                "remove it",
            )
        yield bool(self.train.label_smoothing), "label_smoothing has no effect: there are no labels", "train", "remove it"
        yield (
            images.train is None and not (images.valid is None and images.test is None and not images.valid_share),
            "images are given to validate or to test, but none to train",
            "images",
            "set images.train; without any, the run is on drawn shapes",
        )

    def usual_batch(self, length: int | None) -> UsualBatch:
        """Images; the plan is by image."""
        return UsualBatch(self.images.rows, 1)


def _form(sides: tuple[int, int], channels: int) -> str:
    return f"{sides[0]} x {sides[1]} pixels in {channels} channels"


def _part(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A nested table; an empty one if the value is not a table, which is refused later."""
    part = table.get(name, {})
    return part if isinstance(part, Mapping) else {}
