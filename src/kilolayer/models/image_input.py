"""How a model reads images: the option `image=`, and the table [model.image] of a configuration file."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kilolayer.config import bounded, check, convert_fields, strict_class
from kilolayer.errors import OptionError
from kilolayer.recipes.base import DEEPEST

LARGEST_SIDE = 2**15
SIDES = re.compile(r"(\d{1,5})x(\d{1,5})")


def image_sides(size: int | str) -> tuple[int, int]:
    """Height and width of an image from an option: 32 is a square, "360x480" a height and a width."""
    if isinstance(size, int):
        return size, size
    found = SIDES.fullmatch(size)
    sides = (0, 0) if found is None else (int(found[1]), int(found[2]))
    if not all(1 <= side <= LARGEST_SIDE for side in sides):
        fix = f'give a side in pixels, 32, or height and width, "360x480"; at most {LARGEST_SIDE}'
        raise OptionError(f"size is {size!r}", fix=fix)
    return sides


@strict_class
@dataclass(frozen=True, kw_only=True)
class ImageDecoder:
    """A small decoder that predicts all patches from the visible ones (MAE); its recipe is that of the encoder."""

    layers: int = bounded(8, least=1, most=DEEPEST)
    """Number of its layers."""
    dim: int = bounded(512, least=1, most=2**20)
    """Width of its residual stream."""
    heads: int = bounded(16, least=1, most=2**20)
    """Number of its attention heads; must divide dim."""
    ffn_dim: int | None = bounded(None, least=1, most=2**24)
    """Hidden width of its feed-forward networks. Default: 4 dim."""

    def __post_init__(self) -> None:
        check(self)


@strict_class
@dataclass(frozen=True, kw_only=True)
class ImageInput:
    """Images as sequences of patches, which the encoder reads instead of tokens."""

    size: int | str = bounded(224, least=1, most=LARGEST_SIDE)
    """Side of an image in pixels; or its height and width, "360x480"."""
    patch: int = bounded(16, least=1, most=2**12)
    """Side of a patch in pixels; must divide height and width."""
    channels: int = bounded(3, least=1, most=2**10)
    """Channels of an image: 3 for colours, 1 for shades of grey."""
    class_token: bool = True
    """Put a learned vector before the patches, whose state represents the image. Without it, a head takes the mean."""
    mask_token: bool = False
    """Have a learned vector that replaces masked patches, to train by masked images."""

    decoder: ImageDecoder | None = None
    """Predict patches by a decoder that reads the states of the visible ones: the table [model.image.decoder]. Default: none,
    patches are predicted from their own states."""

    def __post_init__(self) -> None:
        convert_fields(self)
        check(self)
        if any(side % self.patch for side in self.sides):
            near = [max(1, round(side / self.patch)) * self.patch for side in self.sides]
            raise OptionError(
                f"patches of {self.patch} pixels do not divide an image of {self.sides[0]} x {self.sides[1]}",
                fix=f'change patch, or size to "{near[0]}x{near[1]}"',
            )

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return image_sides(self.size)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        height, width = self.sides
        return height // self.patch, width // self.patch

    @property
    def pixels(self) -> int:
        """Numbers in a patch: channels x patch x patch."""
        return self.channels * self.patch**2

    @property
    def first_patch(self) -> int:
        """The number of states before that of the first patch: 1 with a class token."""
        return int(self.class_token)

    @property
    def length(self) -> int:
        """The number of states: one for each patch, and one for the class token."""
        rows, columns = self.grid
        return rows * columns + self.first_patch
