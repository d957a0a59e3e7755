"""The configuration of an image tokenizer: the table [model] of the task image_tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from kilolayer.config import bounded
from kilolayer.errors import OptionError
from kilolayer.importing import import_class
from kilolayer.models.trainable_config import TrainableConfig

if TYPE_CHECKING:
    from torch import Tensor

    from kilolayer.models.trainable import Trainable


@dataclass(frozen=True, kw_only=True)
class ImageTokenizerConfig(TrainableConfig):
    """An image tokenizer: a convolutional encoder and decoder with a codebook between them."""

    title: ClassVar[str] = "image tokenizer"

    height: int = bounded(32, least=1, most=4096)
    """Height of an image in pixels. Default: that of [images]."""
    width: int = bounded(32, least=1, most=4096)
    """Width of an image in pixels. Default: that of [images]."""
    channels: int = bounded(3, least=1, most=3)
    """Channels of an image. Default: those of [images]."""
    patch: int = bounded(4, least=1, most=256)
    """Side of the square of pixels that one code stands for."""
    codes: int = bounded(1024, least=2, most=2**20)
    """Number of codes."""
    code_dim: int = bounded(16, least=1, most=4096)
    """Size of a code's vector."""
    distance: Literal["cosine", "euclidean"] = "cosine"
    """By which the nearest code is found."""
    dim: int = bounded(128, least=1, most=2**14)
    """Channels of the convolutions."""
    blocks: int = bounded(2, least=0, most=1000)
    """Residual blocks of encoder and decoder at the size of the grid of codes, besides one for each halving of the image."""
    decay: float = bounded(0.99, least=0, below=1)
    """Decay rate of the running means that the codes follow."""
    commitment: float = bounded(0.05, least=0, most=1000)
    """Weight of the loss that pulls the encoder's output to its codes."""
    restart: float = bounded(0.03, least=0, most=0.5)
    """A code that is used less than this share of even use moves to one that is used much; 0: never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("height", "width"):
            if (side := getattr(self, name)) % self.patch:
                raise OptionError(
                    f"the {name} of {side} pixels is not a multiple of patch, {self.patch}", fix="change one of them"
                )

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.height, self.width

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of codes."""
        return self.height // self.patch, self.width // self.patch

    @property
    def widths(self) -> str:
        rows, columns = self.grid
        return f"{rows} x {columns} of {self.codes:,} codes, convolutions of {self.dim} channels"

    def build(self) -> Trainable:
        return import_class("kilolayer.models.image_tokenizer:ImageTokenizer", "model")(self)

    def inputs(self, rows: int) -> tuple[Tensor, ...]:
        import torch

        return (torch.empty(rows, self.channels, *self.sides, device="meta"),)


def prime_factors(number: int) -> list[int]:
    """The prime factors, smallest first; none of 1."""
    for factor in range(2, int(number**0.5) + 1):
        if number % factor == 0:
            return [factor, *prime_factors(number // factor)]
    return [number] if number > 1 else []
