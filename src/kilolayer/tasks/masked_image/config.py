"""The configuration of a run that learns from masked images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from kilolayer import config as configuration
from kilolayer.config import Table, check, merge
from kilolayer.data.augment import AugmentConfig
from kilolayer.data.image_masks import ImageMaskingConfig
from kilolayer.data.images import ImagesConfig
from kilolayer.errors import InputError, KilolayerError
from kilolayer.models.config import Shape
from kilolayer.models.image_tokenizer_config import ImageTokenizerConfig
from kilolayer.tasks.config import Fault, RunConfig, UsualBatch, part_of, usual_training
from kilolayer.tasks.image_config import (
    IMAGE_RESUME,
    drawn_defaults,
    image_input,
    input_fault,
    source_faults,
    unlabelled_faults,
)
from kilolayer.tasks.resume_rules import OTHER_BATCHES, ResumeRules

# AdamW with weight decay 0.05, beta2 0.98, gradients clipped at 3 and a cosine: BEiT (Bao et al. 2022, appendix). The learning
# rate, the number of epochs and the share of the warm-up are our choice.
TRAINING: Table = {"schedule": "cosine", "lr": 1e-3, "clip_norm": 3.0, "label_smoothing": 0.0, "valid_sentences": 10**9}
OPTIMIZER: Table = {"optimizer": "adamw", "weight_decay": 0.05, "beta2": 0.98}
EPOCHS, WARMUP = 100, 0.05
DRAWN_EPOCHS = 10
SHARES = {"blocks": 0.4, "random": 0.75}
"""Bao et al. 2022, section 2.3; He et al. 2022, section 3."""

NO_TOKENIZER = "no tokenizer is given, whose codes are to be predicted"
NAME_TOKENIZER = 'name a run of the task "image_tokenizer": target.tokenizer'


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """`[target]`: what is predicted of a hidden patch."""

    kind: Literal["codes", "pixels"] = "pixels"
    """codes: its code by a tokenizer; pixels: its pixels, less their mean and divided by their deviation. Default: codes if a
    tokenizer is given."""
    tokenizer: str | None = None
    """Run of the task image_tokenizer whose codes are predicted. The run keeps a copy of it. Default: that of the run that this
    one starts from."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class MaskedImageConfig(RunConfig):
    """Everything that a run that learns from masked images is made from."""

    shape: ClassVar[Shape | None] = "encoder"
    resume: ClassVar[ResumeRules] = IMAGE_RESUME | ResumeRules(
        breaks={"masking": OTHER_BATCHES, "target": "the outputs of its model belong to these targets"}
    )

    task: str = "masked_image"
    """What is learned."""
    images: ImagesConfig = field(default_factory=ImagesConfig)
    """Images in folders, whose names have no meaning. Without images.train, drawn shapes."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    """How training images are changed at random."""
    masking: ImageMaskingConfig = field(default_factory=ImageMaskingConfig)
    """Which patches are hidden."""
    target: TargetConfig = field(default_factory=TargetConfig)
    """What is predicted of a hidden patch."""

    @classmethod
    def from_start(cls, tables: Table) -> Table:
        """The model, the size of its images and the kind of its target; one that does not predict patches is refused."""
        model = tables["model"]
        image = model.get("image")
        if not isinstance(image, Mapping) or model.get("vocab_size", "none") == "none":
            raise InputError(
                "its model does not predict patches of images",
                fix='name a run of the task "masked_image", or remove start_from',
            )
        sizes = {name: image[name] for name in ("size", "channels") if name in image}
        kind = {"target": {"kind": tables["target"]["kind"]}} if "target" in tables else {}
        grid = {name: value for name, value in image.items() if name not in sizes}
        return {"model": {**model, "image": grid}, "images": sizes, **kind}

    @classmethod
    def defaults(cls, table: Mapping[str, Any]) -> Table:
        train, images, masking, target, model = (
            part_of(table, name) for name in ("train", "images", "masking", "target", "model")
        )
        drawn = train.get("start_from", "none") == "none" and images.get("train", "none") == "none"
        tokenizer = target.get("tokenizer", "none")
        kind = target.get("kind", "pixels" if tokenizer == "none" else "codes")
        codes, patch = _codes_and_patch(tokenizer)
        image = {**image_input(images), **({} if patch is None else {"patch": patch})}
        given = part_of(model, "image")
        image["mask_token"] = given.get("decoder", "none") == "none"
        outputs = codes if kind == "codes" else _pixels({**image, **given})
        usual = {
            "model": {"positions": "learned", "activation": "gelu", "image": image, "vocab_size": outputs},
            "masking": {"share": SHARES.get(str(masking.get("kind")), ImageMaskingConfig.share)},
            "target": {"kind": kind},
            "augment": {"crop": "resized"},  # as BEiT and MAE; borders that a shift brings in would be easy to predict
            "train": usual_training(table, TRAINING, OPTIMIZER, EPOCHS, WARMUP),
        }
        return merge(usual, drawn_defaults(table, DRAWN_EPOCHS, {}) if drawn else {})

    def faults(self) -> Iterator[Fault]:
        model, images, image, target = self.model, self.images, self.model.image, self.target
        yield image is None, "a masked image model reads images", "model", "remove image"
        assert image is not None
        yield (
            model.head is not None or model.map_head is not None,
            "a head does not predict patches",
            "model",
            "remove the head",
        )
        yield input_fault(image, images)
        rows, columns = image.grid
        yield rows * columns < 2, "an image of one patch has none to hide beside it", "model.image", "choose a smaller patch"
        yield (
            image.mask_token == (image.decoder is not None),
            "without a decoder, a mask token takes the place of hidden patches; with one, they are not read",
            "model.image",
            "remove mask_token",
        )
        yield (
            (self.masking.block or 1) > self.hidden,
            f"a block of {self.masking.block} patches is more than the {self.hidden} that are hidden of an image",
            "masking",
            "lower block, or raise share",
        )
        codes = target.kind == "codes"
        yield (
            codes and target.tokenizer is None and self.train.start_from is None,
            NO_TOKENIZER,
            "target",
            NAME_TOKENIZER,
        )
        yield (
            not codes and target.tokenizer is not None,
            "tokenizer has no effect on pixels",
            "target",
            'remove it, or set kind = "codes"',
        )
        yield (
            not codes and model.vocab_size != image.pixels,
            f"vocab_size is {model.vocab_size}, but a patch has {image.pixels} pixels",
            "model",
            "remove vocab_size" + (f"; if the start predicts codes, {NAME_TOKENIZER}" if self.train.start_from else ""),
        )
        yield not codes and image.pixels < 2, "a single pixel has no deviation", "model.image", "choose a larger patch"
        yield (
            not codes and bool(self.train.label_smoothing),
            "label_smoothing has no effect: pixels are no labels",
            "train",
            "remove it",
        )
        yield from unlabelled_faults(images, self.augment, "a masked image model")
        yield from source_faults(images, self.train)

    @property
    def hidden(self) -> int:
        """The number of hidden patches of an image."""
        assert self.model.image is not None
        rows, columns = self.model.image.grid
        return self.masking.count(rows * columns)

    def usual_batch(self, length: int | None) -> UsualBatch:
        """Images, and states of each; with a decoder, the hidden patches have none."""
        image = self.model.image
        assert image is not None
        if image.decoder is not None:
            return UsualBatch(self.images.rows, length or image.length - self.hidden)
        return UsualBatch(self.images.rows, length or image.length, scored=self.hidden)


def _codes_and_patch(tokenizer: Any) -> tuple[int, int | None]:
    """The number of codes and the patch of a tokenizer's run; the usual ones if it cannot be read, which is refused later."""
    if tokenizer == "none":
        return ImageTokenizerConfig.codes, None
    try:
        model = configuration.load(Path(tokenizer) / "config.toml").get("model", {})
        return int(model.get("codes", ImageTokenizerConfig.codes)), int(model.get("patch", ImageTokenizerConfig.patch))
    except (KilolayerError, TypeError, ValueError, AttributeError):
        return ImageTokenizerConfig.codes, None


def _pixels(image: Mapping[str, Any]) -> Any:
    """The pixels of a patch; values that are no numbers are refused later."""
    patch, channels = image["patch"], image["channels"]
    whole = all(isinstance(each, int) and 0 < each < 2**12 for each in (patch, channels))
    return channels * patch**2 if whole else 1
