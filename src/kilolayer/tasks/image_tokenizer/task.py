"""Image tokenizers: reconstruct images from the codes of their patches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kilolayer.data.augment import Augment
from kilolayer.data.drawn_images import data_notes, given_or_drawn
from kilolayer.data.held_out import HeldOut
from kilolayer.data.image_batches import ImageBatches, batch_of, in_order
from kilolayer.data.image_set import ImageSet
from kilolayer.data.image_uri import rows_of_images
from kilolayer.data.images import ImageParts, find_images, normalized, read_images
from kilolayer.evaluate.scores import Score
from kilolayer.layers.modules import in_mode
from kilolayer.models.image_tokenizer import ImageTokenizer
from kilolayer.runtime.recorder import Recorder, evaluating
from kilolayer.tasks import registry
from kilolayer.tasks.image_tokenizer.code_use import collapse_text, has_collapsed, perplexity, used_share
from kilolayer.tasks.image_tokenizer.config import ImageTokenizerRunConfig
from kilolayer.tasks.other_text import OtherText
from kilolayer.tasks.results import VALIDATION, write_results
from kilolayer.tasks.task import Loss, Task

SHOWN = 12
"""Images in the report."""
PEAK = 2.0
"""The distance between black and white, -1 and 1."""
CODES, PICTURE = "code_uses", "reconstructions"
"""Keys of scores.json: how often each code is used, and originals above their reconstructions, a PNG file in base64."""


@dataclass(frozen=True)
class Reconstructed:
    """loss: the mean squared error of a pixel, of images from -1 to 1. psnr: the mean of the images' PSNR, in dB.

    counts: how many patches have each code, int64 [codes].
    """

    loss: float
    psnr: float
    counts: np.ndarray

    @property
    def quality(self) -> float:
        return self.psnr

    @property
    def perplexity(self) -> float:
        """How many codes, used alike, would have the entropy of those that are used."""
        return perplexity(self.counts)

    @property
    def collapsed(self) -> bool:
        """Whether nearly all patches share a few codes."""
        return has_collapsed(self.perplexity, len(self.counts), int(self.counts.sum()))

    def metrics(self) -> dict[str, Any]:
        return {
            "loss": self.loss,
            "psnr": self.psnr,
            "code_perplexity": self.perplexity,
            "codes_used": used_share(self.counts),
            "codes": len(self.counts),
            "collapsed": self.collapsed,
        }

    def __str__(self) -> str:
        used = f"{used_share(self.counts):.1%} of {len(self.counts):,} codes used, perplexity {self.perplexity:,.1f}"
        warning = f"; warning: {collapse_text(self.perplexity, len(self.counts))}" if self.collapsed else ""
        return f"loss {self.loss:.5f}, PSNR {self.psnr:.2f} dB, {used}{warning}"


class ImageTokenizerTask(Task[ImageTokenizerRunConfig]):
    """The images of a run, ready for training, validation and testing."""

    classes = ()

    def __init__(self, parts: ImageParts, config: ImageTokenizerRunConfig) -> None:
        self.config, self.rows = config, config.images.rows
        self.train, self.valid, self.test = parts.train, parts.valid, parts.test
        self.notes = data_notes(config.images, parts.notes)
        self.augment = Augment(config.augment, config.train.seed)

    @classmethod
    def prepare(cls, config: ImageTokenizerRunConfig, cache: Path, vocabulary: None = None) -> ImageTokenizerTask:
        return cls(find_images(given_or_drawn(config.images, cache), cache, labelled=False), config)

    @classmethod
    def read_text(
        cls, config: ImageTokenizerRunConfig, vocabulary: None, text: OtherText, cache: Path
    ) -> Callable[[Any], dict[str, dict[str, Any]]]:
        """Read other images; which folders they are in has no meaning."""
        images = read_images(text.one(registry.get(config.task).title, "folder"), config.images, cache)

        def score(model: Any) -> dict[str, dict[str, Any]]:
            return {"test": _score_table(reconstruct(model, images, config.images.rows), len(images))}

        return score

    def resolve(self, config: ImageTokenizerRunConfig) -> ImageTokenizerRunConfig:
        """The configuration with absolute paths."""
        return replace(config, images=replace(config.images, **config.images.absolute()))

    def training_batches(self, seed: int) -> ImageBatches:
        """Endless shuffled batches of the training images."""
        return ImageBatches(self.train, self.rows, seed)

    def on_device(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Augmented images, fp32 [rows, channels, height, width], and labels int64 [rows], -1 in rows that fill up."""
        pixels, labels, keys = parts
        return self.augment(pixels, labels, keys)

    def loss(self, model: ImageTokenizer, parts: Sequence[Tensor], *, hidden_states: bool) -> Loss:
        """|x - x'|^2 / pixels + commitment |z - e|^2 / patches, summed over images; parts: what `on_device` returns."""
        images, labels = parts
        real = labels >= 0
        output = model(images, real)
        error = (output.images - images).square().flatten(1).mean(dim=1)
        distance = output.quantized.commitment.view(len(images), -1).mean(dim=1)
        reconstruction, committed = ((each * real).sum() for each in (error, distance))
        total = reconstruction + self.config.model.commitment * committed
        return Loss(total, reconstruction, real.sum(), output)

    def held_out(self) -> HeldOut:
        return HeldOut(*(None if part is None else part.digest for part in (self.valid, self.test)))

    def validate(self, model: ImageTokenizer, most: int, recorder: Recorder | None = None) -> Reconstructed | None:
        """The error and the codes of at most `most` validation images; None if there are none."""
        return None if self.valid is None else reconstruct(model, self.valid, self.rows, most, recorder)

    def score(self, model: ImageTokenizer, folder: Path, weights: Mapping[str, Any] | None = None) -> None:
        """Write the scores of the test images, or of the validation images if there are none, and some reconstructions."""
        images = self.test or self.valid
        if images is None:
            write_results(folder, [], {}, weights)
            return
        found = reconstruct(model, images, self.rows)
        table = _score_table(found, len(images))
        name = VALIDATION if self.test is None else "test"
        write_results(folder, [], {name: table, CODES: found.counts.tolist(), PICTURE: _picture(model, images)}, weights)


def _score_table(found: Reconstructed, images: int) -> dict[str, Any]:
    signature = f"images:{images}"
    of_codes = f"{signature}|codes:{len(found.counts)}"
    scores = {
        "psnr": Score("PSNR, dB", found.psnr, signature),
        "code_perplexity": Score("perplexity of the codes", found.perplexity, of_codes),
        "codes_used": Score("codes used, %", 100 * used_share(found.counts), of_codes),
    }
    return {key: asdict(score) for key, score in scores.items()}


@torch.inference_mode()
def reconstruct(
    model: ImageTokenizer, images: ImageSet, rows: int, most: int | None = None, recorder: Recorder | None = None
) -> Reconstructed:
    """Encode and decode images, or `most` from all over the set. rows: images per batch. recorder: runs the forward pass."""

    def work(pixels: Tensor) -> tuple[Tensor, Tensor]:
        originals = normalized(pixels)
        output = model(originals)
        error = (output.images.clamp(-1, 1) - originals).square().flatten(1).mean(dim=1)
        return error, output.quantized.codes.view(len(pixels), -1)

    errors, counts = [], np.zeros(model.config.codes, np.int64)
    with evaluating(model, work, recorder) as run:
        for members, batch in in_order(images, rows, most):
            error, codes = run(batch.parts[0])
            errors.append(error[: len(members)].double().cpu().numpy())
            counts += np.bincount(codes[: len(members)].flatten().cpu().numpy(), minlength=len(counts))
    error = np.concatenate(errors)
    return Reconstructed(float(error.mean()), float(np.mean(decibels(error))), counts)


def decibels(error: np.ndarray) -> np.ndarray:
    """The PSNR of mean squared errors; of an exact image, that of half a step of 8 bits."""
    least = (PEAK / 255 / 2) ** 2
    return 10 * (2 * math.log10(PEAK) - np.log10(np.maximum(error, least)))


@torch.inference_mode()
def _picture(model: ImageTokenizer, images: ImageSet) -> str:
    """A PNG file in base64: images from all over the set, above their reconstructions."""
    chosen = np.unique(np.linspace(0, len(images) - 1, SHOWN).astype(np.int64))
    pixels = batch_of(images, chosen, len(chosen)).pixels
    with in_mode(model, training=False):
        found = model(normalized(pixels.to(next(model.parameters()).device))).images
    again = ((found.clamp(-1, 1).cpu() + 1) * 127.5).round().to(torch.uint8)
    return rows_of_images(pixels, again)
