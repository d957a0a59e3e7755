"""What the configurations of tasks on images share: tables, defaults and checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kilolayer.config import Table, merge
from kilolayer.data.augment import AugmentConfig
from kilolayer.data.images import ImagesConfig, height_and_width
from kilolayer.models.config import Shape
from kilolayer.models.image_input import ImageInput
from kilolayer.tasks import registry
from kilolayer.tasks.config import Fault, RunConfig, UsualBatch, part_of, usual_training
from kilolayer.tasks.resume_rules import OTHER_BATCHES, ResumeRules
from kilolayer.tasks.train_config import TrainConfig

# Usual for small ViTs: AdamW with weight decay 0.05, cosine decay. The number of epochs, the share of the warm-up and the
# learning rates are our choice.
OPTIMIZER: Table = {"optimizer": "adamw", "weight_decay": 0.05, "beta2": 0.999}
TRAINING: Table = {"schedule": "cosine", "clip_norm": 1.0, "valid_sentences": 10**9}
FROM_SCRATCH: Table = {"lr": 2.5e-4}
FINE_TUNING: Table = {"lr": 5e-4, "layer_decay": 0.75}
EPOCHS, WARMUP = 100, 0.05
SMALL, SMALL_PATCH, PATCH = 64, 4, 16
"""Images of up to `SMALL` pixels a side are cut into patches of 4 pixels, larger ones into those of ViT."""
DRAWN: Table = {
    "model": {"layers": 4, "dim": 64, "heads": 4, "ffn_dim": 128},
    "images": {"rows": 60},
    "train": {"lr": 2e-3},
}
"""What learns the drawn shapes within a minute on a CPU."""
OF_LABELS = ("mixup", "cutmix", "erasing")
"""Augmentation that makes images which only a classifier is meant to read."""
IMAGE_RESUME = ResumeRules(
    files=("images.train", "images.valid", "images.test"),
    breaks={"images": OTHER_BATCHES, "augment": "the images of the steps so far were changed differently"},
)


@dataclass(frozen=True, kw_only=True)
class ImageTaskConfig(RunConfig):
    """Everything that a run is made from that predicts classes from images."""

    shape: ClassVar[Shape | None] = "encoder"

    images: ImagesConfig = field(default_factory=ImagesConfig)
    """Images."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    """How training images are changed at random."""

    @classmethod
    def on_drawn(cls, table: Mapping[str, Any]) -> bool:
        """Whether a run is on drawn shapes, from scratch."""
        return not cls.started(table) and part_of(table, "images").get("train", "none") == "none"

    @classmethod
    def started(cls, table: Mapping[str, Any]) -> bool:
        """Whether a run starts from another model."""
        return part_of(table, "train").get("start_from", "none") != "none"

    @classmethod
    def image_defaults(cls, table: Mapping[str, Any]) -> Table:
        """The defaults of [model] and [train] for a table; the images that the model reads are those of [images]."""
        rates = FINE_TUNING if cls.started(table) else FROM_SCRATCH
        train = usual_training(table, {**TRAINING, **rates}, OPTIMIZER, EPOCHS, WARMUP)
        image = image_input(part_of(table, "images"))
        return {"model": {"positions": "learned", "activation": "gelu", "image": image}, "train": train}

    def faults(self) -> Iterator[Fault]:
        image, images, title = self.model.image, self.images, registry.get(self.task).title
        assert image is not None  # a task checks it, with its head
        yield input_fault(image, images)
        yield image.mask_token, f"mask_token has no effect on {title}", "model.image", "remove it"
        yield from source_faults(images, self.train)

    def usual_batch(self, length: int | None) -> UsualBatch:
        """Images, and states of each: one per patch, and one of the class token."""
        assert self.model.image is not None
        return UsualBatch(self.images.rows, length or self.model.image.length)


def drawn_defaults(table: Mapping[str, Any], epochs: int, more: Table) -> Table:
    """The defaults for drawn shapes, which are small; more: those of a task."""
    found = merge(merge(DRAWN, more), {"train": {} if "steps" in part_of(table, "train") else {"epochs": epochs}})
    if "encoder_layers" in part_of(table, "model"):
        found["model"] = {name: value for name, value in found["model"].items() if name != "layers"}
    return found


def image_input(images: Mapping[str, Any]) -> Table:
    """The defaults of [model.image] for the images of a run."""
    size = images.get("size", ImagesConfig.size)
    known = isinstance(size, int | str) and not isinstance(size, bool)
    small = known and max(height_and_width(size)) <= SMALL
    channels = images.get("channels", ImagesConfig.channels)
    return {"size": size, "channels": channels, "patch": SMALL_PATCH if small else PATCH}


def input_fault(image: ImageInput, images: ImagesConfig) -> Fault:
    """A model that reads other images than those of the run."""
    return (
        (image.sides, image.channels) != (images.sides, images.channels),
        f"the model reads {form_of(image.sides, image.channels)}, but [images] has {form_of(images.sides, images.channels)}",
        "model.image",
        "remove size and channels: those of [images] are taken",
    )


def source_faults(images: ImagesConfig, train: TrainConfig) -> Iterator[Fault]:
    """Images to validate or to test without any to train, and patience without any to validate."""
    validates = images.valid is not None or bool(images.valid_share)
    yield (
        images.train is None and (validates or images.test is not None),
        "images are given to validate or to test, but none to train",
        "images",
        "set images.train; without any, the run is on drawn shapes",
    )
    yield (
        bool(train.patience) and images.train is not None and not validates,
        "patience has no effect without validation images",
        "train",
        "set images.valid or images.valid_share",
    )


def unlabelled_faults(images: ImagesConfig, augment: AugmentConfig, title: str) -> Iterator[Fault]:
    """Options of labels and of classifiers, in a task that reconstructs images; title: what its runs are called."""
    yield bool(images.classes), f"classes have no effect on {title}", "images", "remove them"
    for name in OF_LABELS:
        yield (
            bool(getattr(augment, name)),
            f"{name} would make images that {title} is not meant to reconstruct",
            "augment",
            "remove it",
        )


def form_of(sides: tuple[int, int], channels: int) -> str:
    """The size of images in words."""
    return f"{sides[0]} x {sides[1]} pixels in {channels} channels"
