"""The weights of a model that reads images, for images or patches of another size."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.layers.grid_positions import resampled
from kilolayer.models.config import ModelConfig
from kilolayer.models.trainable_config import TrainableConfig

POSITIONS, PATCHES = ("positions.weight", "decoder.positions.weight"), "patches.projection.weight"
REGRIDDED = (*POSITIONS, PATCHES)
"""The weights that `regridded` computes with."""


def regridded(
    weights: Mapping[str, Tensor], there: ModelConfig | TrainableConfig, here: ModelConfig | TrainableConfig
) -> dict[str, Tensor]:
    """The weights of the model `there`, as the model `here` needs them for its patches and its grid of them.

    Learned positions, those of a small decoder too, are resampled for the grid, and the projection of patches for their size.
    The weights of models that do not both read images are left as they are.
    """
    found = dict(weights)
    if isinstance(there, TrainableConfig) or isinstance(here, TrainableConfig) or there.image is None or here.image is None:
        return found
    if there.positions == here.positions == "learned":
        found |= {name: resampled(found[name], there.image.grid, here.image.grid) for name in POSITIONS if name in found}
    if there.image.patch != here.image.patch:
        found[PATCHES] = repatched(found[PATCHES], there.image.patch, here.image.patch)
    return found


def repatched(weight: Tensor, old: int, new: int) -> Tensor:
    """The projection [dim, channels * old * old] of patches, for patches of another size: [dim, channels * new * new].

    With R [new * new, old * old], which scales a patch p of one channel, it is the W' that is nearest to W' R p = W p for all
    p: a patch that is scaled up has the vector that it had (Beyer et al. 2023, FlexiViT).
    """
    pixels = torch.eye(old * old, dtype=torch.float64).view(-1, 1, old, old)
    scaling = F.interpolate(pixels, size=(new, new), mode="bilinear", antialias=True).flatten(1).T
    back = torch.linalg.pinv(scaling).to(weight.device)
    return (weight.double().unflatten(1, (-1, old * old)) @ back).flatten(1).to(weight.dtype)
