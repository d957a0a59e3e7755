"""What the configurations of tasks share that reconstruct images, and read no labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kilolayer.config import Table
from kilolayer.data.augment import AugmentConfig
from kilolayer.data.images import ImagesConfig, height_and_width
from kilolayer.models.image_input import ImageInput
from kilolayer.tasks.config import Fault
from kilolayer.tasks.resume_rules import OTHER_BATCHES, ResumeRules

SMALL, SMALL_PATCH, PATCH = 64, 4, 16
"""Images of up to `SMALL` pixels a side are cut into patches of 4 pixels, larger ones into those of ViT."""
OF_LABELS = ("mixup", "cutmix", "erasing")
"""Augmentation that makes images which only a classifier is meant to read."""
UNLABELLED_RESUME = ResumeRules(
    files=("images.train", "images.valid", "images.test"),
    breaks={"images": OTHER_BATCHES, "augment": "the images of the steps so far were changed differently"},
)


def sub_table(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A nested table; an empty one if the value is not a table, which is refused later."""
    part = table.get(name, {})
    return part if isinstance(part, Mapping) else {}


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


def source_fault(images: ImagesConfig) -> Fault:
    """Images to validate or to test without any to train."""
    return (
        images.train is None and not (images.valid is None and images.test is None and not images.valid_share),
        "images are given to validate or to test, but none to train",
        "images",
        "set images.train; without any, the run is on drawn shapes",
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
