"""What is predicted of hidden patches: codes of a tokenizer, or normalized pixels.

Images are fp32 [rows, channels, height, width], from -1 to 1. hidden: int64 [rows, k], the indices of hidden patches. outputs:
those of the model at hidden patches, [rows, k, outputs].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from kilolayer.layers.patches import from_patches, to_patches
from kilolayer.models.encoder import states_at
from kilolayer.models.image_input import ImageInput
from kilolayer.tasks.masked_image.code_vocabulary import CodeVocabulary

EPSILON = 1e-6
"""Added to the variance of a patch, as in the code of MAE."""


class Target(ABC):
    """loss_title: what its loss is called. key, title: of the score beside the loss. digits: its decimals."""

    loss_title: ClassVar[str]
    key: ClassVar[str]
    title: ClassVar[str]
    digits: ClassVar[int]

    @abstractmethod
    def labels(self, images: Tensor, hidden: Tensor) -> Tensor:
        """What is to be predicted: [rows, k, ...]."""

    @abstractmethod
    def losses(self, outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """The loss of each hidden patch, fp32 [rows, k]."""

    @abstractmethod
    def measure(self, outputs: Tensor, labels: Tensor, images: Tensor, hidden: Tensor) -> Tensor:
        """The score of each hidden patch beside the loss, fp32 [rows, k]."""

    @abstractmethod
    def filled(self, outputs: Tensor, images: Tensor, hidden: Tensor) -> Tensor:
        """Images whose hidden patches are as the model predicts them."""


class CodeTarget(Target):
    """Codes, predicted by cross-entropy (Bao et al. 2022, equation 2). The tokenizer reads the whole image."""

    loss_title, key, title, digits = "loss of masked patches, nats", "accuracy", "accuracy of masked codes, %", 2

    def __init__(self, vocabulary: CodeVocabulary) -> None:
        self.vocabulary = vocabulary

    def labels(self, images: Tensor, hidden: Tensor) -> Tensor:
        """int64 [rows, k]."""
        return self.vocabulary.encode(images).gather(1, hidden)

    def losses(self, outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        scores = outputs.float().flatten(0, 1)
        return F.cross_entropy(scores, labels.flatten(), label_smoothing=smoothing, reduction="none").view_as(labels)

    def measure(self, outputs: Tensor, labels: Tensor, images: Tensor, hidden: Tensor) -> Tensor:
        return 100.0 * (outputs.argmax(dim=-1) == labels).float()

    def filled(self, outputs: Tensor, images: Tensor, hidden: Tensor) -> Tensor:
        """Drawn by the tokenizer from the codes of the visible patches and the most probable ones of the others."""
        codes = self.vocabulary.encode(images).scatter(1, hidden, outputs.argmax(dim=-1))
        return self.vocabulary.decode(codes)


class PixelTarget(Target):
    """Pixels, by the squared error of n(p) = (p - mean(p)) / sqrt(var(p) + eps) for a patch p (He et al. 2022, section 3)."""

    loss_title, key, title, digits = "loss of masked patches, squared error", "mse", "mean squared error of pixels", 5

    def __init__(self, image: ImageInput) -> None:
        self.patch, self.grid = image.patch, image.grid

    def labels(self, images: Tensor, hidden: Tensor) -> Tensor:
        """fp32 [rows, k, pixels]."""
        patches, mean, deviation = self._patches(images, hidden)
        return (patches - mean) / deviation

    def losses(self, outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        return (outputs.float() - labels).square().mean(dim=-1)

    def measure(self, outputs: Tensor, labels: Tensor, images: Tensor, hidden: Tensor) -> Tensor:
        """The squared error with the patch's own mean and deviation."""
        _, _, deviation = self._patches(images, hidden)
        return ((outputs.float() - labels) * deviation).square().mean(dim=-1)

    def filled(self, outputs: Tensor, images: Tensor, hidden: Tensor) -> Tensor:
        """Predictions with the patch's own mean and deviation, which the model does not predict."""
        patches, mean, deviation = self._patches(images, hidden)
        drawn = (outputs.float() * deviation + mean).clamp(-1, 1)
        whole = to_patches(images, self.patch).scatter(1, hidden[:, :, None].expand_as(patches), drawn)
        return from_patches(whole, self.grid, self.patch)

    def _patches(self, images: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden patches [rows, k, pixels], their means and their deviations [rows, k, 1]."""
        patches = states_at(to_patches(images, self.patch), hidden)
        deviation = (patches.var(dim=-1, keepdim=True) + EPSILON).sqrt()
        return patches, patches.mean(dim=-1, keepdim=True), deviation
