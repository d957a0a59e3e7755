"""Errors of an image classifier on corrupted images: fifteen corruptions at five strengths, and a sketch-like rendering."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kilolayer.data.all_over import members_all_over
from kilolayer.data.corruptions import NAMES, STRENGTHS, corrupt, sketch
from kilolayer.data.image_batches import batch_of
from kilolayer.data.image_set import ImageSet
from kilolayer.data.images import normalized
from kilolayer.layers.modules import in_mode
from kilolayer.models.encoder import Encoder


@dataclass(frozen=True)
class Robustness:
    """Top-1 errors in percent: of the images as they are, of their sketches, and of each corruption at strengths 1 to 5."""

    images: int
    seed: int
    clean: float
    sketch: float
    errors: dict[str, list[float]]

    @property
    def mean_corruption_error(self) -> float:
        """The mean over all corruptions and strengths; not divided by the errors of another model, as ImageNet-C's is."""
        return float(np.mean(list(self.errors.values())))

    def rows(self) -> list[list[str]]:
        """A row for each corruption: its name, the errors at strengths 1 to 5, and their mean."""
        return [
            [name.replace("_", " "), *(f"{each:.2f}" for each in errors), f"{np.mean(errors):.2f}"]
            for name, errors in self.errors.items()
        ]

    @property
    def header(self) -> list[str]:
        """The titles of the columns of `rows`."""
        return ["corruption", *map(str, STRENGTHS), "mean"]

    def table(self) -> dict[str, Any]:
        """Everything as plain values."""
        return asdict(self) | {"mean_corruption_error": self.mean_corruption_error}


@torch.inference_mode()
def measure_robustness(
    model: Encoder,
    images: ImageSet,
    rows: int,
    *,
    most: int | None = None,
    seed: int = 0,
    show: Callable[[str], None] | None = None,
) -> Robustness:
    """The errors of a model on labelled images. rows: images per batch.

    most: only so many, from all over the set. show: called with what is measured next.
    """
    members = members_all_over(len(images), most)

    def error(change: Callable[[Tensor, int], Tensor], name: str) -> float:
        if show is not None:
            show(name)
        wrong = 0
        for start in range(0, len(members), rows):
            few = members[start : start + rows]
            batch, device = batch_of(images, few, len(few)), next(model.parameters()).device
            changed = change(batch.pixels.to(device), start)
            wrong += int((model(normalized(changed)).logits.argmax(dim=-1) != batch.labels.to(device)).sum())
        return 100 * wrong / len(members)

    with in_mode(model, training=False):
        clean = error(lambda pixels, first: pixels, "images as they are")
        drawn = error(lambda pixels, first: sketch(pixels), "sketches")
        errors = {
            name: [
                error(lambda pixels, first: corrupt(pixels, name, strength, seed, first), f"{name} {strength}")  # noqa: B023
                for strength in STRENGTHS
            ]
            for name in NAMES
        }
    return Robustness(len(members), seed, clean, drawn, errors)
