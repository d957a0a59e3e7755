"""Predicted classes of images: their loss, accuracy with its interval, and which classes are taken for which."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.data.image_batches import in_order
from kilolayer.data.image_set import ImageSet
from kilolayer.data.images import normalized
from kilolayer.models.encoder import Encoder
from kilolayer.runtime.recorder import Recorder, evaluating

Z = 1.959964
"""The normal distribution has 95% of its mass within this many standard deviations."""
BEST = 5


@dataclass(frozen=True)
class Accuracy:
    """A share of images in percent, as scores.json has it, with its 95% interval (Wilson 1927)."""

    name: str
    value: float
    signature: str
    low: float
    high: float

    @classmethod
    def of(cls, name: str, right: int, images: int) -> Accuracy:
        """That of `right` among `images`."""
        low, high = (100 * end for end in wilson(right, images))
        return cls(name, 100 * right / images, f"n:{images}|95%:{low:.2f}-{high:.2f}|interval:wilson", low, high)


@dataclass(frozen=True)
class ImageScores:
    """Predictions against labels.

    confusion: int64 [class, predicted class]. top5: images whose class is among the five most probable ones; None if there are
    no more classes.
    """

    loss: float
    confusion: np.ndarray
    top5: int | None

    @property
    def images(self) -> int:
        """How many there are."""
        return int(self.confusion.sum())

    @property
    def quality(self) -> float:
        """For choosing a checkpoint: larger is better."""
        return self.scores()["accuracy"].value

    def scores(self) -> dict[str, Accuracy]:
        """The scores by their names in scores.json."""
        found = {"accuracy": Accuracy.of("top-1 accuracy", int(np.trace(self.confusion)), self.images)}
        return found if self.top5 is None else found | {"top5": Accuracy.of("top-5 accuracy", self.top5, self.images)}

    def metrics(self) -> dict[str, Any]:
        """The values for metrics.jsonl."""
        return {"loss": self.loss, **{key: score.value for key, score in self.scores().items()}}

    def __str__(self) -> str:
        return ", ".join([f"loss {self.loss:.4f}", *(f"{each.name} {each.value:.2f}%" for each in self.scores().values())])


def wilson(right: int, count: int) -> tuple[float, float]:
    """The 95% interval of a share of which `right` of `count` draws are an estimate."""
    share, z2 = right / count, Z**2 / count
    center = (share + z2 / 2) / (1 + z2)
    half = math.sqrt(share * (1 - share) * z2 + z2**2 / 4) / (1 + z2)
    return max(0.0, center - half), min(1.0, center + half)


@torch.inference_mode()
def predict_images(
    model: Encoder, images: ImageSet, rows: int, most: int | None = None, recorder: Recorder | None = None
) -> np.ndarray:
    """fp32 [images, classes]: the scores of all images, or of `most` from all over the set. rows: images per batch."""
    found: list[np.ndarray] = []

    def scores(pixels: Tensor) -> Tensor:
        return model(normalized(pixels)).logits.float()

    with evaluating(model, scores, recorder) as run:
        for members, batch in in_order(images, rows, most):
            logits = run(batch.pixels)
            found.append(logits[: len(members)].cpu().numpy())
    return np.concatenate(found)


def measure_images(scores: np.ndarray, labels: np.ndarray) -> ImageScores:
    """Compare scores, fp32 [images, classes], with class indices, int64 [images]."""
    loss = F.cross_entropy(torch.from_numpy(scores).double(), torch.from_numpy(labels))
    classes = scores.shape[1]
    confusion = np.zeros((classes, classes), np.int64)
    np.add.at(confusion, (labels, scores.argmax(axis=1)), 1)
    best = np.argpartition(-scores, BEST - 1, axis=1)[:, :BEST] if classes > BEST else None
    return ImageScores(float(loss), confusion, None if best is None else int((best == labels[:, None]).sum()))
