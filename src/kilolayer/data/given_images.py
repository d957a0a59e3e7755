"""Images that a user gives to a trained model: files, folders, archives, images of Pillow, or pixels."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike, fsdecode
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kilolayer.data.image_decoding import LEFT_OUT, decode, is_image_name, require_vision
from kilolayer.data.image_source import LARGEST, ImageSource
from kilolayer.errors import InputError, KilolayerError, shown
from kilolayer.files.paths import kind_of
from kilolayer.files.reading import read_bytes
from kilolayer.terminal import say

Found = tuple[str, bytes | str]
"""The name of an image, and its file; or why there is none."""


@dataclass(frozen=True)
class GivenImage:
    """Pixels, uint8 [height, width, channels], or why there are none; name: its path, or its number among those given."""

    name: str
    pixels: np.ndarray | None
    fault: str | None = None


def given_images(images: Any, channels: int, sides: tuple[int, int] | None = None) -> Iterator[GivenImage]:
    """Read images one by one. sides: height and width, to which others are scaled and cropped; None: each has its own."""
    require_vision()
    listed: Iterable[Any] = [images] if isinstance(images, str | PathLike) else images
    found = (each for number, source in enumerate(listed, 1) for each in _files_of(source, number))
    return (_decoded(name, data, channels, sides) for name, data in found)


def is_one_image(images: Any) -> bool:
    """Whether this is one image: a path of a file, an image of Pillow, or pixels."""
    if isinstance(images, str | PathLike):
        return kind_of(Path(fsdecode(images))) != "folder" and not ImageSource.parse(fsdecode(images)).is_archive
    return hasattr(images, "shape") or not isinstance(images, Iterable)


def unreadable(name: str, fault: str) -> InputError:
    """The error for an image that is given alone and cannot be read."""
    return InputError(fault, where=name, fix="give an image that Pillow can read, with 8 or 16 bits a channel")


def stacked(images: Sequence[GivenImage]) -> Tensor:
    """Those that could be read: uint8 [n, channels, height, width]."""
    pixels = [each.pixels for each in images if each.pixels is not None]
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) if pixels else torch.empty(0, dtype=torch.uint8)


def _decoded(name: str, data: bytes | str, channels: int, sides: tuple[int, int] | None) -> GivenImage:
    if isinstance(data, str):
        return GivenImage(name, None, data)
    pixels, reasons = decode(data, channels, sides)
    return GivenImage(name, pixels, LEFT_OUT[reasons[0]].partition(":")[0] if pixels is None else None)


def _files_of(source: Any, number: int) -> Iterator[Found]:
    """The image files that a source stands for: itself, or those in a folder or an archive; number: among the sources."""
    if not isinstance(source, str | PathLike):
        yield f"image {number}", _file_of(source, number)
        return
    path = fsdecode(source)
    try:
        if kind_of(Path(path)) == "folder" or ImageSource.parse(path).is_archive:
            yield from _files_below(path)
        else:
            yield path, read_bytes(Path(path), LARGEST)
    except KilolayerError as error:
        yield path, error.what


def _files_below(path: str) -> Iterator[Found]:
    source, joint, found, others = ImageSource.parse(path), "/" if kind_of(Path(path)) == "folder" else ":", False, []
    for entry in source.entries():
        if entry.data is not None and is_image_name(entry.name):
            found = True
            yield f"{path.rstrip('/')}{joint if not source.inner else '/'}{entry.name}", entry.data
        elif entry.data is not None:
            others.append(entry.name)
    if others:
        say(f"{path}: {LEFT_OUT['other']}: {', '.join(others[:5])}{', ...' if others[5:] else ''}")
    if not found:
        yield path, "there is no image here"


def _file_of(image: Any, number: int) -> bytes:
    """An image of Pillow, or pixels, as the bytes of a file without loss."""
    from PIL import Image, ImageOps

    if isinstance(image, torch.Tensor):
        image = image.numpy(force=True)
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and (image.ndim == 2 or _has_channels_last(image)):
        image = Image.fromarray(image[..., 0] if image.ndim == 3 and image.shape[2] == 1 else image)
    if not isinstance(image, Image.Image):
        raise InputError(
            f"this is {f'{image.dtype} of shape {list(image.shape)}' if isinstance(image, np.ndarray) else shown(image)}",
            where=f"image {number}",
            fix="give a path, an image of Pillow, or pixels: uint8 [height, width, channels]",
        )
    if image.mode == "F":  # such a file is not read either
        raise InputError(
            "this image of Pillow has floating-point pixels",
            where=f"image {number}",
            fix='give levels from 0 to 255: image.convert("L") of such, or pixels as uint8',
        )
    image, buffer = ImageOps.exif_transpose(image), io.BytesIO()
    of_png = image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16") else image.convert("RGB")
    of_png.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _has_channels_last(image: np.ndarray) -> bool:
    return image.ndim == 3 and image.shape[2] in (1, 2, 3, 4)
