"""Masked images: an encoder of patches predicts what hidden patches show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from kilolayer.data.augment import Augment
from kilolayer.data.drawn_images import data_notes, given_or_drawn
from kilolayer.data.frequencies import frequency_loss
from kilolayer.data.held_out import HeldOut
from kilolayer.data.image_batches import ImageBatches, batch_of, in_order
from kilolayer.data.image_masks import ImageMasks
from kilolayer.data.image_set import ImageSet
from kilolayer.data.image_uri import rows_of_images
from kilolayer.data.images import ImageParts, find_images, normalized, read_images
from kilolayer.errors import OptionError
from kilolayer.evaluate.likelihood import TextScore
from kilolayer.files.paths import resolve
from kilolayer.models.image_encoder import ImageEncoder
from kilolayer.models.image_tokenizer_config import ImageTokenizerConfig
from kilolayer.runtime.recorder import Recorder
from kilolayer.tasks import registry
from kilolayer.tasks.image_config import form_of
from kilolayer.tasks.masked_image.code_vocabulary import CodeVocabulary
from kilolayer.tasks.masked_image.config import NAME_TOKENIZER, NO_TOKENIZER, MaskedImageConfig
from kilolayer.tasks.masked_image.predict import HELD_OUT, MaskedImageScores, inputs_of, measure, predict, reconstruct
from kilolayer.tasks.masked_image.targets import CodeTarget, PixelTarget, Target
from kilolayer.tasks.other_text import OtherText
from kilolayer.tasks.results import VALIDATION, write_results
from kilolayer.tasks.task import Loss, Task

SHOWN = 12
"""Images in the report."""
GAP = 2
"""White pixels between them."""
COUNTED = 256
"""Training images whose codes are counted."""
PICTURE = "reconstructions"
"""Key of scores.json: images, what the model reads of them and what it makes of that, a PNG file in base64."""


class MaskedImageTask(Task[MaskedImageConfig]):
    """The images of a run, ready for training, validation and testing. vocabulary: the tokenizer, where codes are predicted."""

    records_on_device: ClassVar[bool] = True

    def __init__(self, parts: ImageParts, config: MaskedImageConfig, vocabulary: CodeVocabulary | None) -> None:
        self.config, self.rows, self._vocabulary = config, config.images.rows, vocabulary
        self.train, self.valid, self.test = parts.train, parts.valid, parts.test
        self.notes = data_notes(config.images, parts.notes)
        self.augment = Augment(config.augment, config.train.seed)
        self.masks, self.fixed_masks = masks_of(config, config.train.seed), masks_of(config, HELD_OUT)
        self.target = target_of(config, vocabulary)

    @classmethod
    def prepare(cls, config: MaskedImageConfig, cache: Path, vocabulary: CodeVocabulary | None = None) -> MaskedImageTask:
        if config.target.kind == "codes" and vocabulary is None:
            if config.target.tokenizer is None:
                raise OptionError(NO_TOKENIZER, where="target", fix=NAME_TOKENIZER)
            vocabulary = CodeVocabulary.of_run(Path(config.target.tokenizer))
        parts = find_images(given_or_drawn(config.images, cache), cache, labelled=False)
        return cls(parts, config, vocabulary if config.target.kind == "codes" else None)

    @classmethod
    def load_vocabulary(cls, config: MaskedImageConfig, folder: Path) -> CodeVocabulary | None:
        return CodeVocabulary.load(folder) if config.target.kind == "codes" else None

    @classmethod
    def read_text(
        cls, config: MaskedImageConfig, vocabulary: CodeVocabulary | None, text: OtherText, cache: Path
    ) -> Callable[[Any], dict[str, dict[str, Any]]]:
        """Read other images; which folders they are in has no meaning."""
        title = registry.get(config.task).title
        source = text.one(title, "folder")
        images, target, masks = (
            read_images(source, config.images, cache),
            target_of(config, vocabulary),
            masks_of(config, HELD_OUT),
        )

        def score(model: Any) -> dict[str, dict[str, Any]]:
            return {"test": _table(measure(model, target, masks, images, config.images.rows), config)}

        return score

    @property
    def vocabulary(self) -> CodeVocabulary | None:
        return self._vocabulary

    @property
    def classes(self) -> Sequence[int]:
        """The codes; none if the loss is a squared error."""
        return () if self._vocabulary is None else range(self._vocabulary.config.codes)

    def resolve(self, config: MaskedImageConfig) -> MaskedImageConfig:
        """The configuration with one output for each code, and absolute paths."""
        config = replace(config, images=replace(config.images, **config.images.absolute()))
        if self._vocabulary is None:
            return config
        config = replace(config, model=replace(config.model, vocab_size=self._vocabulary.config.codes))
        if config.target.tokenizer is None:
            return config
        folder = resolve(Path(config.target.tokenizer))
        if CodeVocabulary.of_run(folder).digest != self._vocabulary.digest:
            raise OptionError(
                "the tokenizer is not that of the run to start from",
                where="target.tokenizer",
                fix="remove it: that one is taken",
            )
        return replace(config, target=replace(config.target, tokenizer=str(folder)))

    def training_batches(self, seed: int) -> ImageBatches:
        """Endless shuffled batches of the training images."""
        return ImageBatches(self.train, self.rows, seed, labels_per_image=self.masks.count)

    def on_device(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Augmented images, fp32 [rows, channels, height, width]; their patches, visible ones first, int64 [rows, patches];
        what is to be predicted of the hidden ones, [rows, hidden, ...]; and which rows are images, bool [rows]."""
        pixels, labels, keys = parts
        images, _ = self.augment(pixels, labels, keys)
        order = self.masks(keys)
        return images, order, self.target.labels(images, order[:, -self.masks.count :]), labels >= 0

    def loss(self, model: ImageEncoder, parts: Sequence[Tensor], *, hidden_states: bool) -> Loss:
        """The loss of hidden patches; parts: what `on_device` returns. Rows that only fill up the batch are not counted."""
        images, order, labels, real = parts
        outputs, out = predict(model, images, order, self.masks.count, hidden_states=hidden_states)
        smoothing = self.config.train.label_smoothing
        nll = (self.target.losses(outputs, labels) * real[:, None]).sum()
        total = (self.target.losses(outputs, labels, smoothing) * real[:, None]).sum() if smoothing else nll
        return Loss(total, nll, real.sum() * self.masks.count, out)

    def model_inputs(self, parts: Sequence[Tensor]) -> Mapping[str, Tensor]:
        images, order, _, real = parts
        has_decoder = self.config.model.image is not None and self.config.model.image.decoder is not None
        return inputs_of(images[real], order[real], self.masks.count, has_decoder=has_decoder)

    def held_out(self) -> HeldOut:
        return HeldOut(*(None if part is None else part.digest for part in (self.valid, self.test)))

    @torch.inference_mode()
    def frequency_loss(self) -> float | None:
        """That of the codes of a few training images; None for pixels."""
        if self._vocabulary is None:
            return None
        counts = np.zeros(self._vocabulary.config.codes, np.int64)
        for members, batch in in_order(self.train, self.rows, COUNTED):
            codes = self._vocabulary.encode(normalized(batch.pixels[: len(members)]))
            counts += np.bincount(codes.flatten().numpy(), minlength=len(counts))
        return frequency_loss(counts)

    def validate(self, model: ImageEncoder, most: int, recorder: Recorder | None = None) -> MaskedImageScores | None:
        """The scores of at most `most` validation images, with masks that never change; None if there are none."""
        return (
            None if self.valid is None else measure(model, self.target, self.fixed_masks, self.valid, self.rows, most, recorder)
        )

    def score(self, model: ImageEncoder, folder: Path, weights: Mapping[str, Any] | None = None) -> None:
        """Write the scores of the test images, or of the validation images if there are none, and some reconstructions."""
        images = self.test or self.valid
        if images is None:
            write_results(folder, [], {}, weights)
            return
        table = _table(measure(model, self.target, self.fixed_masks, images, self.rows), self.config)
        name = VALIDATION if self.test is None else "test"
        write_results(folder, [], {name: table, PICTURE: self._picture(model, images)}, weights)

    def _picture(self, model: ImageEncoder, images: ImageSet) -> str:
        """Images from all over the set, above what the model reads of them and what it makes of that."""
        chosen = np.unique(np.linspace(0, len(images) - 1, SHOWN).astype(np.int64))
        batch = batch_of(images, chosen, len(chosen))
        shown = reconstruct(model, self.target, self.fixed_masks, batch.pixels, batch.keys)
        return rows_of_images(batch.pixels, *shown, gap=GAP)


def masks_of(config: MaskedImageConfig, seed: int) -> ImageMasks:
    """The masks of a run; seed: that of the run for training, `HELD_OUT` for masks that never change."""
    assert config.model.image is not None
    return ImageMasks(config.masking, config.model.image.grid, seed)


def target_of(config: MaskedImageConfig, vocabulary: CodeVocabulary | None) -> Target:
    """What is predicted; a tokenizer of other images or patches than those of the model is refused."""
    image = config.model.image
    assert image is not None
    if vocabulary is None:
        return PixelTarget(image)
    own = vocabulary.config
    if (own.sides, own.channels, own.patch) != (image.sides, image.channels, image.patch):
        raise OptionError(
            f"the tokenizer reads {_patches(own)}, but the model {_patches(image)}",
            where="target.tokenizer",
            fix="train a tokenizer for these images and patches, or change [images] and model.image.patch",
        )
    if config.model.vocab_size not in (own.codes, ImageTokenizerConfig.codes):
        raise OptionError(
            f"vocab_size is {config.model.vocab_size}, but there are {own.codes} codes", where="model", fix="remove vocab_size"
        )
    return CodeTarget(vocabulary)


def _patches(form: Any) -> str:
    return f"{form_of(form.sides, form.channels)}, in patches of {form.patch}"


def _table(found: MaskedImageScores, config: MaskedImageConfig) -> dict[str, Any]:
    scores: Mapping[str, TextScore] = found.scores(f"{config.masking.kind}:{config.masking.share:g}")
    return {key: asdict(score) for key, score in scores.items()}
