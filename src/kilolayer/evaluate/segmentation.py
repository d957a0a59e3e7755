"""Predicted classes of pixels: their loss, and how well each class's pixels are found, with intervals.

    IoU of a class = pixels that are and are called it / pixels that are or are called it,    mean IoU: over classes

Pixels of void are left out, and so are, from the mean, classes that neither the labels nor the predictions have. Intervals are
those of resampled sets of images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.data.augment import IGNORED
from kilolayer.data.image_pairs import ImagePairs, pairs_in_order
from kilolayer.data.images import normalized
from kilolayer.evaluate.significance import SAMPLES, SEED, resampled_sums
from kilolayer.layers.modules import in_mode
from kilolayer.models.encoder import Encoder
from kilolayer.runtime.recorder import Recorder, evaluating

RIGHT, LABELS, CALLED = range(3)
"""What is counted of the pixels of a class: those that are and are called it, those that are, and those that are called it."""
TAIL = 2.5
"""Percent of the resampled sets beyond each end of an interval."""


@dataclass(frozen=True)
class PixelScore:
    """A score in percent, as scores.json has it, with its 95% interval."""

    name: str
    value: float
    signature: str
    low: float
    high: float


@dataclass(frozen=True)
class ClassIoU:
    """The IoU of a class in percent, with its 95% interval; None if no pixel is or is called it. pixels: those that are."""

    iou: float | None
    low: float | None
    high: float | None
    pixels: int


@dataclass(frozen=True)
class Segmentation:
    """Predictions against labels. loss: the mean over pixels. counts: int64 [images, 3, classes], by `RIGHT`, ..."""

    loss: float
    counts: np.ndarray

    @property
    def quality(self) -> float:
        """For choosing a checkpoint: larger is better."""
        return float(mean_iou(self.counts.sum(axis=0)))

    @property
    def pixel_accuracy(self) -> float:
        """The share of labelled pixels whose class is right, in percent."""
        return float(pixel_accuracy(self.counts.sum(axis=0)))

    def scores(self) -> dict[str, PixelScore]:
        """The scores by their names in scores.json."""
        images, _, classes = self.counts.shape
        absent = int(np.isnan(ious(self.counts.sum(axis=0))).sum())
        resampled = self._resampled()
        found = {}
        for key, name, function in (
            ("mean_iou", "mean IoU", mean_iou),
            ("pixel_accuracy", "pixel accuracy", pixel_accuracy),
        ):
            low, high = _interval(function(resampled))
            signature = f"n:{images}|classes:{classes - absent}|absent:{absent}|void:left_out|95%:{low:.2f}-{high:.2f}"
            value = float(function(self.counts.sum(axis=0)))
            found[key] = PixelScore(name, value, f"{signature}|bs:{SAMPLES}|seed:{SEED}", low, high)
        return found

    def by_class(self) -> list[ClassIoU]:
        """The IoU of each class."""
        whole, resampled = self.counts.sum(axis=0), ious(self._resampled())
        found = []
        for number, iou in enumerate(ious(whole)):
            known = not np.isnan(iou)
            low, high = _interval(resampled[:, number]) if known else (None, None)
            found.append(ClassIoU(float(iou) if known else None, low, high, int(whole[LABELS, number])))
        return found

    def metrics(self) -> dict[str, Any]:
        """The values for metrics.jsonl."""
        return {"loss": self.loss, "mean_iou": self.quality, "pixel_accuracy": self.pixel_accuracy}

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}, mean IoU {self.quality:.2f}%, pixel accuracy {self.pixel_accuracy:.2f}%"

    def _resampled(self) -> np.ndarray:
        """fp64 [samples, 3, classes]: the counts of resampled sets of images."""
        flat = self.counts.reshape(len(self.counts), -1).astype(np.float64)
        return resampled_sums(flat).reshape(-1, *self.counts.shape[1:])


def ious(counts: np.ndarray) -> np.ndarray:
    """[..., classes]: the IoU of each class in percent, nan if no pixel is or is called it; counts [..., 3, classes]."""
    right, either = counts[..., RIGHT, :], counts[..., LABELS, :] + counts[..., CALLED, :] - counts[..., RIGHT, :]
    return np.where(either > 0, 100 * right / np.maximum(either, 1), np.nan)


def mean_iou(counts: np.ndarray) -> np.ndarray:
    """[...]: the mean IoU over the classes that occur; counts [..., 3, classes]. 0 if none does."""
    found = ious(counts)
    there = ~np.isnan(found)
    return np.where(there, found, 0).sum(axis=-1) / np.maximum(there.sum(axis=-1), 1)


def pixel_accuracy(counts: np.ndarray) -> np.ndarray:
    """[...]: the share of labelled pixels whose class is right, in percent; counts [..., 3, classes]."""
    right, labels = (counts[..., each, :].sum(axis=-1) for each in (RIGHT, LABELS))
    return 100 * right / np.maximum(labels, 1)


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.nanpercentile(values, [TAIL, 100 - TAIL])
    return float(low), float(high)


def count_pixels(found: Tensor, labels: Tensor, classes: int) -> Tensor:
    """int64 [rows, 3, classes]: by `RIGHT`, `LABELS` and `CALLED`; found, labels: int64 [rows, height, width], -1 for void."""
    real = labels >= 0
    chosen = {RIGHT: real & (found == labels), LABELS: real, CALLED: real}
    values = {RIGHT: labels, LABELS: labels, CALLED: found}
    counts = torch.zeros(len(labels), len(chosen), classes + 1, dtype=torch.int64, device=labels.device)
    for kind, where in chosen.items():
        index = torch.where(where, values[kind], classes).flatten(1)  # the last is of pixels that are not counted
        counts[:, kind].scatter_add_(1, index, torch.ones_like(index))
    return counts[..., :classes]


@torch.inference_mode()
def measure_pixels(
    model: Encoder, images: ImagePairs, rows: int, most: int | None = None, recorder: Recorder | None = None
) -> Segmentation:
    """The scores of a model on images with label images, or on `most` from all over the set. rows: images per batch."""
    classes = len(images.classes)

    def work(pixels: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        labels = torch.where(ids == IGNORED, -1, ids.long())
        logits = model(normalized(pixels)).logits.float()
        nll = F.cross_entropy(logits, labels, ignore_index=-1, reduction="none").flatten(1).sum(dim=1)
        return nll, count_pixels(logits.argmax(dim=1), labels, classes)

    losses, counts = [], []
    with evaluating(model, work, recorder) as run:
        for members, batch in pairs_in_order(images, rows, most):
            nll, counted = run(*batch.parts[:2])
            losses.append(nll[: len(members)].double().cpu().numpy())
            counts.append(counted[: len(members)].cpu().numpy())
    every = np.concatenate(counts)
    return Segmentation(float(np.concatenate(losses).sum() / max(1, every[:, LABELS].sum())), every)


@torch.inference_mode()
def pixel_scores(model: Encoder, pixels: Tensor) -> Tensor:
    """fp32 [n, classes, height, width], on the model's device; pixels: uint8 [n, channels, height, width]."""
    with in_mode(model, training=False):
        logits = model(normalized(pixels.to(next(model.parameters()).device))).logits
    assert logits is not None
    return logits.float()


def classes_of(scores: Tensor) -> np.ndarray:
    """uint8 [n, height, width]: the best class of each pixel; scores: fp32 [n, classes, height, width]."""
    return scores.argmax(dim=1).to(torch.uint8).cpu().numpy()
