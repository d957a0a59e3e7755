"""The configuration of a run that classifies images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kilolayer.config import Table, merge
from kilolayer.data.images import ImagesConfig
from kilolayer.tasks.config import Fault, part_of
from kilolayer.tasks.image_body import body_of
from kilolayer.tasks.image_config import IMAGE_RESUME, ImageTaskConfig, drawn_defaults
from kilolayer.tasks.resume_rules import ResumeRules

SMOOTHING = 0.1  # usual for small ViTs
DRAWN_EPOCHS, DRAWN_PATCH = 25, 8


@dataclass(frozen=True, kw_only=True)
class ClassifyImageConfig(ImageTaskConfig):
    """Everything that a run that classifies images is made from."""

    resume: ClassVar[ResumeRules] = IMAGE_RESUME

    task: str = "classify_image"
    """What is learned."""
    images: ImagesConfig = field(default_factory=ImagesConfig)
    """Images in folders by class. Without images.train, drawn shapes."""

    @classmethod
    def from_start(cls, tables: Table) -> Table:
        """The body of a model that reads images; the images have the size of those that it was trained on."""
        return body_of(tables)

    @classmethod
    def defaults(cls, table: Mapping[str, Any]) -> Table:
        named = part_of(table, "images").get("classes")
        outputs = {"outputs": len(named)} if isinstance(named, list) and named else {}
        head = {"pooler": "none", "dropout": 0.0, **outputs}
        own: Table = {"model": {"head": head}, "train": {"label_smoothing": SMOOTHING}}
        found = merge(cls.image_defaults(table), own)
        if not cls.on_drawn(table):
            return found
        return merge(found, drawn_defaults(table, DRAWN_EPOCHS, {"model": {"image": {"patch": DRAWN_PATCH}}}))

    def faults(self) -> Iterator[Fault]:
        missing = self.model.head is None or self.model.image is None
        yield missing, "an image classifier reads images, and has a head", "model", "remove head and image"
        yield from super().faults()
