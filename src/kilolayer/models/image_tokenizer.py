"""An image as a grid of discrete codes, one for each patch, and back: a small convolutional encoder, a codebook, a decoder."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kilolayer.errors import InputError
from kilolayer.models.codebook import Codebook, CodebookSums, Quantized
from kilolayer.models.image_tokenizer_config import ImageTokenizerConfig, prime_factors
from kilolayer.models.trainable import Trainable


@dataclass(frozen=True)
class TokenizedImages:
    """images: the reconstruction, [batch, channels, height, width]. quantized: one vector for each patch, row by row."""

    images: Tensor
    quantized: Quantized


class ResidualBlock(nn.Module):
    """x + W2 f(W1 f(x)), convolutions of 3 x 3; f is SiLU.

    There are no norms: over an image they would take away its brightness, and let a code depend on all of its patches.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(dim, dim, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, dim, rows, columns] to the same."""
        return x + self.conv2(F.silu(self.conv1(F.silu(x))))


class ImageTokenizer(Trainable):
    """Images [batch, channels, height, width], of numbers from -1 to 1, to codes int64 [batch, rows * columns] and back."""

    def __init__(self, config: ImageTokenizerConfig) -> None:
        super().__init__()
        self.config, dim, factors = config, config.dim, prime_factors(config.patch)
        self.encoder = nn.Sequential(
            nn.Conv2d(config.channels, dim, 3, padding=1),
            *(part for factor in factors for part in (_down(factor, dim), ResidualBlock(dim))),
            *(ResidualBlock(dim) for _ in range(config.blocks)),
            nn.SiLU(),
            nn.Conv2d(dim, config.code_dim, 1),
        )
        self.codebook = Codebook(config.codes, config.code_dim, config.distance, config.decay, config.restart)
        self.decoder = nn.Sequential(
            nn.Conv2d(config.code_dim, dim, 1),
            *(ResidualBlock(dim) for _ in range(config.blocks)),
            *(part for factor in reversed(factors) for part in (ResidualBlock(dim), _up(factor, dim))),
            nn.SiLU(),
            nn.Conv2d(dim, config.channels, 3, padding=1),
        )
        self._initialize()

    def _initialize(self) -> None:
        """He's weights without biases, and residual blocks that begin as the identity.

        The vectors of patches are then as different as the patches. Those of torch's weights differ little beside the biases,
        and share a few codes for long.
        """
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                assert module.bias is not None
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, ResidualBlock):
                nn.init.zeros_(module.conv2.weight)

    def forward(self, images: Tensor, real: Tensor | None = None) -> TokenizedImages:
        """Reconstruct images from their codes; real: bool [batch], False at images that do not count."""
        z = self.encoder(images)
        batch, dim, rows, columns = z.shape
        counted = torch.ones(batch, dtype=torch.bool, device=z.device) if real is None else real
        vectors = z.permute(0, 2, 3, 1).reshape(-1, dim)
        quantized = self.codebook(vectors, counted.repeat_interleave(rows * columns, output_size=len(vectors)))
        grid = quantized.vectors.view(batch, rows, columns, dim).permute(0, 3, 1, 2)
        return TokenizedImages(self.decoder(grid), quantized)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of codes of an image."""
        return self.config.grid

    def encode(self, images: Tensor) -> Tensor:
        """The codes of images: int64 [batch, rows * columns], row by row."""
        self.check_images(images)
        z = self.encoder(images)
        return self.codebook.nearest(z.permute(0, 2, 3, 1).reshape(-1, z.shape[1])).view(len(images), -1)

    def decode(self, codes: Tensor) -> Tensor:
        """The images of codes, int64 [batch, rows * columns]: [batch, channels, height, width], of numbers from -1 to 1."""
        self.check_codes(codes)
        vectors = self.codebook.lookup(codes).view(len(codes), *self.grid, -1)
        return self.decoder(vectors.permute(0, 3, 1, 2)).clamp(-1, 1)

    def check_images(self, images: Tensor, *others: torch.dtype) -> None:
        """Raise if these are no images of the right size. others: dtypes that are allowed besides floating-point ones."""
        expected = (self.config.channels, *self.config.sides)
        fits = images.is_floating_point() or images.dtype in others
        if images.dim() != 4 or tuple(images.shape[1:]) != expected or not fits:
            dtypes = " or ".join(
                ["floating-point numbers from -1 to 1", *(str(each).removeprefix("torch.") for each in others)]
            )
            raise InputError(
                f"images are {images.dtype} of shape {list(images.shape)}",
                fix=f"allowed: {dtypes}, [batch, {', '.join(map(str, expected))}]",
            )

    def check_codes(self, codes: Tensor) -> None:
        """Raise if these are no codes of images; their range is checked on the CPU alone, because a GPU would have to wait."""
        rows, columns = self.grid
        if codes.dim() != 2 or codes.shape[1] != rows * columns or codes.dtype != torch.int64:
            raise InputError(
                f"codes are {codes.dtype} of shape {list(codes.shape)}", fix=f"allowed: int64 [batch, {rows * columns}]"
            )
        if codes.device.type == "cpu" and codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < self.config.codes:
            raise InputError("a code is out of range", fix=f"allowed: 0 to {self.config.codes - 1}")

    def step_sums(self) -> ImageTokenizerSums:
        """The codes follow the vectors of each step."""
        return ImageTokenizerSums(self.codebook)


class ImageTokenizerSums(CodebookSums):
    """The sums of the codebook, from the output of the whole model."""

    def record(self, output: TokenizedImages) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Add the vectors of a batch that count."""
        super().record(output.quantized)


def _down(factor: int, dim: int) -> nn.Conv2d:
    return nn.Conv2d(dim, dim, *_kernel(factor))


def _up(factor: int, dim: int) -> nn.ConvTranspose2d:
    return nn.ConvTranspose2d(dim, dim, *_kernel(factor))


def _kernel(factor: int) -> tuple[int, int, int]:
    """Kernel, stride and padding by which a convolution divides, or a transposed one multiplies, the sides exactly."""
    return (4, 2, 1) if factor == 2 else (factor, factor, 0)
