"""The configuration of a run that classifies images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kilolayer.config import Table, merge
from kilolayer.data.augment import AugmentConfig
from kilolayer.data.images import ImagesConfig, height_and_width
from kilolayer.errors import InputError
from kilolayer.models.config import Shape
from kilolayer.tasks.config import Fault, RunConfig, UsualBatch
from kilolayer.tasks.resume_rules import OTHER_BATCHES, ResumeRules

# Usual for small ViTs: AdamW with weight decay 0.05, cosine decay, label smoothing 0.1. The learning rates, the number of
# epochs and the share of the warm-up are our choice.
TRAINING: Table = {
    "schedule": "cosine",
    "label_smoothing": 0.1,
    "clip_norm": 1.0,
    "valid_sentences": 10**9,
}
OPTIMIZER: Table = {"optimizer": "adamw", "weight_decay": 0.05, "beta2": 0.999}
FROM_SCRATCH: Table = {"lr": 1e-3}
FINE_TUNING: Table = {"lr": 5e-4, "layer_decay": 0.75}
EPOCHS, WARMUP = 100, 0.05
DRAWN: Table = {
    "model": {"layers": 4, "dim": 64, "heads": 4, "ffn_dim": 128, "image": {"patch": 8}},
    "images": {"rows": 60},
    "train": {"lr": 2e-3},
}
DRAWN_EPOCHS = 25
"""What learns the drawn shapes within half a minute on a CPU."""
SMALL, SMALL_PATCH, PATCH = 64, 4, 16
"""Images of up to `SMALL` pixels a side are cut into patches of 4 pixels, larger ones into those of ViT."""
OF_PATCHES = ("vocab_size", "output_transform", "output_bias", "map_head", "head")
"""Options of what another model predicts."""
OF_MASKS = ("mask_token", "decoder", "size", "channels")


@dataclass(frozen=True, kw_only=True)
class ClassifyImageConfig(RunConfig):
    """Everything that a run that classifies images is made from."""

    shape: ClassVar[Shape | None] = "encoder"
    resume: ClassVar[ResumeRules] = ResumeRules(
        files=("images.train", "images.valid", "images.test"),
        breaks={"images": OTHER_BATCHES, "augment": "the images of the steps so far were changed differently"},
    )

    task: str = "classify_image"
    """What is learned."""
    images: ImagesConfig = field(default_factory=ImagesConfig)
    """Images in folders by class. Without images.train, drawn shapes."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    """How training images are changed at random."""

    @classmethod
    def from_start(cls, tables: Table) -> Table:
        """The body of a model that reads images; the images have the size of those that it was trained on."""
        model = tables["model"]
        image = model.get("image")
        if not isinstance(image, Mapping):
            raise InputError("its model does not read images", fix="name a run of an image task")
        body = {name: value for name, value in model.items() if name not in OF_PATCHES}
        body["image"] = {name: value for name, value in image.items() if name not in OF_MASKS}
        return {"model": body, "images": {name: image[name] for name in ("size", "channels") if name in image}}

    @classmethod
    def defaults(cls, table: Mapping[str, Any]) -> Table:
        train, images = _part(table, "train"), _part(table, "images")
        started = train.get("start_from", "none") != "none"
        own = {**TRAINING, **(FINE_TUNING if started else FROM_SCRATCH)}
        own |= {} if "optimizer" in train else OPTIMIZER
        drawn = not started and images.get("train", "none") == "none"
        own |= {} if "steps" in train else {"epochs": DRAWN_EPOCHS if drawn else EPOCHS}
        own |= {} if "warmup_steps" in train else {"warmup_share": WARMUP}
        size = images.get("size", ImagesConfig.size)
        known = isinstance(size, int | str) and not isinstance(size, bool)
        small = known and max(height_and_width(size)) <= SMALL
        image = {
            "size": size,
            "channels": images.get("channels", ImagesConfig.channels),
            "patch": SMALL_PATCH if small else PATCH,
        }
        model = {"positions": "learned", "activation": "gelu", "image": image, "head": {"pooler": "none", "dropout": 0.0}}
        return merge({"model": model, "train": own}, DRAWN if drawn else {})

    def faults(self) -> Iterator[Fault]:
        model, images = self.model, self.images
        image, head = model.image, model.head
        yield (
            head is None or image is None,
            "an image classifier reads images, and has a head",
            "model",
            "remove head and image",
        )
        assert image is not None
        yield (
            (image.sides, image.channels) != (images.sides, images.channels),
            f"the model reads {_form(image.sides, image.channels)}, but [images] has {_form(images.sides, images.channels)}",
            "model.image",
            "remove size and channels: those of [images] are taken",
        )
        yield image.mask_token, "mask_token has no effect on an image classifier", "model.image", "remove it"
        yield (
            images.train is None and not (images.valid is None and images.test is None and not images.valid_share),
            "images are given to validate or to test, but none to train",
            "images",
            "set images.train; without any, the run is on drawn shapes",
        )
        yield (
            bool(self.train.patience) and images.train is not None and images.valid is None and not images.valid_share,
            "patience has no effect without validation images",
            "train",
            "set images.valid or images.valid_share",
        )

    def usual_batch(self, length: int | None) -> UsualBatch:
        """Images, and states of each: one per patch, and one of the class token."""
        assert self.model.image is not None
        return UsualBatch(self.images.rows, length or self.model.image.length)


def _form(sides: tuple[int, int], channels: int) -> str:
    return f"{sides[0]} x {sides[1]} pixels in {channels} channels"


def _part(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A nested table; an empty one if the value is not a table, which is refused later."""
    part = table.get(name, {})
    return part if isinstance(part, Mapping) else {}
