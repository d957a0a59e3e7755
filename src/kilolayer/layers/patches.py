"""Images as sequences: each patch of pixels becomes one vector, by a linear map of its flattened pixels.

    x = [class_token, W p_1 + b, ..., W p_n + b]

Patches are read row by row. The pixels of a patch are flattened by channel, row and column, so that W [dim, pixels] is the
kernel [dim, channels, patch, patch] of the convolution by which other libraries compute the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kilolayer.layers.initialize import KeyedGenerator


def to_patches(images_BCHW: Tensor, patch: int) -> Tensor:
    """Flattened patches, row by row: [batch, channels, height, width] to [batch, patches, channels * patch * patch]."""
    cut = images_BCHW.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # batch, channels, rows, patch, columns, patch
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def from_patches(patches_BND: Tensor, grid: tuple[int, int], patch: int) -> Tensor:
    """The inverse of `to_patches` for a grid of (rows, columns): [batch, channels, height, width]."""
    cut = patches_BND.unflatten(2, (-1, patch, patch)).unflatten(1, grid)
    return cut.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


class PatchProjection(nn.Module):
    """W p + b of each patch p: [batch, patches, pixels] to [batch, patches, dim].

    W [dim, pixels] is drawn from N(0, std^2), b starts at 0. states_dtype: as that of `Embedding`.
    """

    def __init__(self, pixels: int, dim: int, std: float) -> None:
        super().__init__()
        self.std = std
        self.states_dtype: torch.dtype | None = None
        self.weight = nn.Parameter(torch.empty(dim, pixels))
        self.bias = nn.Parameter(torch.empty(dim))

    def reset_parameters(self, generator: KeyedGenerator | None = None) -> None:
        generator = generator or KeyedGenerator()
        generator.normal_(self.weight, self.std)
        self.bias.zero_()

    def forward(self, patches: Tensor) -> Tensor:
        """In `states_dtype` if `Model.cast_weights` has set one, else in the dtype of the weights."""
        y = F.linear(patches.to(self.weight.dtype), self.weight, self.bias)
        return y.to(self.states_dtype or self.weight.dtype)


class PatchEmbedding(nn.Module):
    """The vectors of an image's patches, a class token before them and a mask token in the place of some, if there are such.

    std: of the initial projection. token_std: of the initial tokens, [dim] each.
    """

    def __init__(self, pixels: int, dim: int, *, class_token: bool, mask_token: bool, std: float, token_std: float) -> None:
        super().__init__()
        self.token_std = token_std
        self.projection = PatchProjection(pixels, dim, std)
        self.class_token = nn.Parameter(torch.empty(dim)) if class_token else None
        self.mask_token = nn.Parameter(torch.empty(dim)) if mask_token else None

    def reset_parameters(self, generator: KeyedGenerator | None = None) -> None:
        generator = generator or KeyedGenerator()
        for name, token in self.named_parameters(recurse=False):
            generator.normal_(token, self.token_std, name)

    def forward(self, patches: Tensor, masked: Tensor | None = None) -> Tensor:
        """[batch, patches, pixels] to [batch, patches, dim]; masked: bool [batch, patches], True at the mask token."""
        x = self.projection(patches)
        if masked is None:
            return x
        assert self.mask_token is not None
        return torch.where(masked[:, :, None], self.mask_token.to(x.dtype), x)

    def with_class_token(self, x: Tensor) -> Tensor:
        """[batch, patches, dim] to [batch, 1 + patches, dim]; unchanged without a class token."""
        if self.class_token is None:
            return x
        return torch.cat([self.class_token.to(x.dtype).expand(len(x), 1, -1), x], dim=1)
