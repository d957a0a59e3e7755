"""A trained image tokenizer as a Python object."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor

from kilolayer.data.images import normalized
from kilolayer.errors import InputError, shown
from kilolayer.runs.trained_run import TrainedRun

MOST = 1.5
"""The largest number of an image that may have been scaled to -1 to 1; interpolation can go a little beyond 1."""
AT_ONCE = 256
"""Images that are encoded or decoded together."""


class TrainedImageTokenizer(TrainedRun):
    """What `kl.load` returns: `encode` gives the codes of images, `decode` the images of codes."""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of codes of an image."""
        return cast("tuple[int, int]", self.reader.grid)  # pyright: ignore[reportAttributeAccessIssue]

    @torch.inference_mode()
    def encode(self, images: Tensor | np.ndarray) -> Tensor:
        """The codes of images: int64 [images, rows * columns], row by row, on the CPU.

        images: [images, channels, height, width], uint8, or floating-point numbers from -1 to 1.
        """
        given = _as_tensor(images, "images")
        if given.is_floating_point() and given.abs().max() > MOST:
            raise InputError(
                f"images have numbers up to {given.abs().max():.4g}", fix="scale them to -1 to 1, or give levels as uint8"
            )
        codes = [self.reader.encode(self._read(each)) for each in given.split(AT_ONCE)]  # pyright: ignore[reportCallIssue]
        return torch.cat(codes).cpu()

    @torch.inference_mode()
    def decode(self, codes: Tensor | np.ndarray) -> Tensor:
        """The images of codes, int64 [images, rows * columns]: fp32 [images, channels, height, width], from -1 to 1."""
        given = _as_tensor(codes, "codes").cpu()
        self.reader.check_codes(given)  # pyright: ignore[reportCallIssue]
        images = [self.reader.decode(each.to(self.device)) for each in given.split(AT_ONCE)]  # pyright: ignore[reportCallIssue]
        return torch.cat(images).cpu()

    def _read(self, images: Tensor) -> Tensor:
        self.reader.check_images(images, torch.uint8)  # pyright: ignore[reportCallIssue]
        on_device = images.to(self.device)
        return normalized(on_device) if on_device.dtype == torch.uint8 else on_device.float()


def _as_tensor(given: Tensor | np.ndarray, kind: str) -> Tensor:
    if not isinstance(given, Tensor | np.ndarray) or not len(given):
        raise InputError(f"{kind} are {shown(given)}", fix="give a tensor or an array of at least one")
    return torch.as_tensor(given)
