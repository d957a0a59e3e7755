"""Batches of images: shuffled for training, in order for scoring."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from kilolayer.data.all_over import members_all_over
from kilolayer.data.endless import EndlessBatches
from kilolayer.data.image_set import ImageSet

FILLED = -1
"""The label of a row that only fills up a batch."""
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class ImageBatch:
    """Images, as they are in the file. The last batch of an epoch is filled up with black images, which do not count."""

    pixels: Tensor
    """uint8 [rows, channels, height, width]."""
    labels: Tensor
    """int64 [rows], class indices, 0 for images without labels; -1 in rows that fill up the batch."""
    keys: Tensor
    """int64 [rows, 2]: the index of the image in its set, and the epoch. What is drawn for an image depends on these alone."""
    tokens: int
    """The weight of this batch's mean loss."""

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Pixels, labels and keys."""
        return self.pixels, self.labels, self.keys


class BatchesOfImages(EndlessBatches[Kind]):
    """An endless iterator over batches of `rows` images; the order of each epoch depends only on (seed, epoch)."""

    def __init__(self, images: ImageSet, rows: int, seed: int = 0) -> None:
        self.images, self.rows = images, min(rows, len(images))
        self._planned: tuple[int, np.ndarray] | None = None
        super().__init__(seed, images.digest, self.rows)

    @abstractmethod
    def batch(self, members: np.ndarray) -> Kind:
        """The images with indices `members`, int64 [n], filled up to `rows`."""

    def read(self, index: int) -> Kind:
        """The batch with this index in the current epoch."""
        return self.batch(self._order()[index * self.rows :][: self.rows])

    def __len__(self) -> int:
        """Number of batches in an epoch, including a last one that may be filled up."""
        return -(-len(self.images) // self.rows)

    @property
    def summary(self) -> str:
        """One line for the log: what was read, and how it is batched."""
        return f"{self.images.title}; batches of {self.rows}"

    def _order(self) -> np.ndarray:
        """int64 [images]: the order of this epoch."""
        if self._planned is None or self._planned[0] != self.epoch:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.images))
            self._planned = self.epoch, order
        return self._planned[1]


class ImageBatches(BatchesOfImages[ImageBatch]):
    """An endless iterator over batches of `rows` images.

    labels_per_image: what a task predicts for an image, such as a number of masked patches: the weight of an image.
    """

    def __init__(self, images: ImageSet, rows: int, seed: int = 0, *, labels_per_image: int = 1) -> None:
        super().__init__(images, rows, seed)
        self.labels_per_image = labels_per_image

    def batch(self, members: np.ndarray) -> ImageBatch:
        return batch_of(self.images, members, self.rows, self.epoch, self.labels_per_image)


def batch_of(images: ImageSet, members: np.ndarray, rows: int, epoch: int = 0, labels_per_image: int = 1) -> ImageBatch:
    """The images with indices `members`, int64 [n], filled up to `rows`."""
    pixels = np.zeros((rows, *images.pixels.shape[1:]), np.uint8)
    pixels[: len(members)] = images.pixels[members]
    labels = np.full(rows, FILLED, np.int64)
    labels[: len(members)] = 0 if images.labels is None else images.labels[members]
    keys = np.zeros((rows, 2), np.int64)
    keys[: len(members), 0], keys[:, 1] = members, epoch
    channels_first = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
    return ImageBatch(channels_first, torch.from_numpy(labels), torch.from_numpy(keys), len(members) * labels_per_image)


def in_order(images: ImageSet, rows: int, most: int | None = None) -> Iterator[tuple[np.ndarray, ImageBatch]]:
    """Every image once, or `most` of them, in order: the indices of each batch, and the batch."""
    for members in members_in_order(images, rows, most):
        yield members, batch_of(images, members, min(rows, len(images)))


def members_in_order(images: ImageSet, rows: int, most: int | None = None) -> Iterator[np.ndarray]:
    """The indices of every image once, or of `most` of them: int64 [rows], the last ones fewer."""
    members = members_all_over(len(images), most)
    for start in range(0, len(members), rows):
        yield members[start : start + rows]
