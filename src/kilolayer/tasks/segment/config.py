"""The configuration of a run that segments images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kilolayer.config import Table, merge
from kilolayer.data.image_pairs import ImagePairsConfig
from kilolayer.tasks.config import Fault, part_of
from kilolayer.tasks.image_body import body_of
from kilolayer.tasks.image_config import IMAGE_RESUME, ImageTaskConfig, drawn_defaults
from kilolayer.tasks.resume_rules import ResumeRules

DRAWN_EPOCHS, DRAWN_PATCH, DRAWN_ROWS, DRAWN_PAD, DRAWN_CHANNELS = 6, 8, 40, 2, 32


@dataclass(frozen=True, kw_only=True)
class SegmentConfig(ImageTaskConfig):
    """Everything that a run that segments images is made from."""

    resume: ClassVar[ResumeRules] = ResumeRules(
        files=tuple(f"images.{name}" for name in ImagePairsConfig.sources()),
        breaks=IMAGE_RESUME.breaks,
    )

    task: str = "segment"
    """What is learned."""
    images: ImagePairsConfig = field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default_factory=ImagePairsConfig
    )
    """Images, and label images of the same names. Without images.train, drawn shapes."""

    @classmethod
    def from_start(cls, tables: Table) -> Table:
        """The body of a model that reads images, and the form of its map head, if it has one."""
        found, head = body_of(tables), tables["model"].get("map_head")
        kept = {name: value for name, value in head.items() if name != "classes"} if isinstance(head, Mapping) else None
        return found if kept is None else merge(found, {"model": {"map_head": kept}})

    @classmethod
    def defaults(cls, table: Mapping[str, Any]) -> Table:
        named, given = part_of(table, "images").get("classes"), part_of(part_of(table, "model"), "map_head")
        head = {"kind": "upernet", **({"classes": len(named)} if isinstance(named, list) and named else {})}
        found = merge(cls.image_defaults(table), {"model": {"map_head": head}, "train": {"label_smoothing": 0.0}})
        if not cls.on_drawn(table):
            return found
        width = {} if given.get("kind") == "linear" else {"map_head": {"channels": DRAWN_CHANNELS}}
        pads = part_of(table, "augment").get("crop", "pad") == "pad"
        own: Table = {
            "model": {"image": {"patch": DRAWN_PATCH}, **width},
            "images": {"rows": DRAWN_ROWS},
            "augment": {"pad": DRAWN_PAD} if pads else {},
        }
        return merge(found, drawn_defaults(table, DRAWN_EPOCHS, own))

    def faults(self) -> Iterator[Fault]:
        missing = self.model.map_head is None or self.model.image is None
        yield missing, "a segmentation model reads images, and has a map head", "model", "remove map_head and image"
        yield self.augment.mixes, "mixup and cutmix have no effect on label images", "augment", "remove them"
        yield from super().faults()
