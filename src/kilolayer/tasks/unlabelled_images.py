"""What the configurations of tasks share that reconstruct images, and read no labels."""

from __future__ import annotations

from collections.abc import Iterator

from kilolayer.data.augment import AugmentConfig
from kilolayer.data.images import ImagesConfig
from kilolayer.tasks.config import Fault
from kilolayer.tasks.resume_rules import OTHER_BATCHES, ResumeRules

OF_LABELS = ("mixup", "cutmix", "erasing")
"""Augmentation that makes images which only a classifier is meant to read."""
UNLABELLED_RESUME = ResumeRules(
    files=("images.train", "images.valid", "images.test"),
    breaks={"images": OTHER_BATCHES, "augment": "the images of the steps so far were changed differently"},
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
