"""The configuration of a run of an image tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kilolayer.config import Table
from kilolayer.data.augment import AugmentConfig
from kilolayer.data.images import ImagesConfig, height_and_width
from kilolayer.models.image_tokenizer_config import ImageTokenizerConfig
from kilolayer.tasks.config import Fault, RunConfig, UsualBatch, part_of, usual_training
from kilolayer.tasks.image_config import IMAGE_RESUME, form_of, source_faults, unlabelled_faults
from kilolayer.tasks.resume_rules import ResumeRules

TRAINING: Table = {"schedule": "cosine", "lr": 1e-3, "clip_norm": 1.0, "label_smoothing": 0.0, "valid_sentences": 10**9}
OPTIMIZER: Table = {"optimizer": "adamw", "beta2": 0.99}
EPOCHS, WARMUP = 50, 0.05


@dataclass(frozen=True, kw_only=True)
class ImageTokenizerRunConfig(RunConfig):
    """Everything that a run of an image tokenizer is made from."""

    resume: ClassVar[ResumeRules] = IMAGE_RESUME

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
        images = part_of(table, "images")
        model: Table = {"channels": images.get("channels", ImagesConfig.channels)}
        size = images.get("size", ImagesConfig.size)
        if isinstance(size, int | str) and not isinstance(size, bool):
            model["height"], model["width"] = height_and_width(size)
        return {"model": model, "train": usual_training(table, TRAINING, OPTIMIZER, EPOCHS, WARMUP)}

    def faults(self) -> Iterator[Fault]:
        model, images = self.model, self.images
        yield (
            (*model.sides, model.channels) != (*images.sides, images.channels),
            f"the model reads images of {form_of(model.sides, model.channels)}, but [images] has "
            + form_of(images.sides, images.channels),
            "model",
            "remove height, width and channels: those of [images] are taken",
        )
        yield from unlabelled_faults(images, self.augment, "an image tokenizer")
        yield bool(self.train.label_smoothing), "label_smoothing has no effect: there are no labels", "train", "remove it"
        yield from source_faults(images, self.train)

    def usual_batch(self, length: int | None) -> UsualBatch:
        """Images; the plan is by image."""
        return UsualBatch(self.images.rows, 1)
