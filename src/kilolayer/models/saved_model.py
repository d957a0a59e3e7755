"""Save and load a model without a run: one of ours, or one that `kl.adapt` changed."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kilolayer.files.paths import as_path, kind_of
from kilolayer.models import saved
from kilolayer.models.adapt.applied import is_adapted
from kilolayer.models.adapt.saved import load_adapted, save_adapted
from kilolayer.models.model import Model
from kilolayer.models.pretrained_folder import is_foreign
from kilolayer.models.wrapped_folder import is_wrapped, load_wrapped


def save(model: Model | nn.Module, folder: str | PathLike[str]) -> Path:
    """Save a model to a new or empty folder, or over a model saved before; return the folder.

    model: one of ours, or a model of torch or Transformers that `kl.adapt` has changed, which is saved with its recipe.

    Each tensor is written once, in its own dtype: parameters, and buffers such as Admin's calibrated scales. At any time, even
    after a kill, the folder holds the old model, the new one, or no weights at all.
    """
    if isinstance(model, nn.Module) and not isinstance(model, Model) and is_adapted(model):
        return save_adapted(model, folder)
    return saved.save(model, folder)  # pyright: ignore[reportArgumentType]


def load_model(
    folder: str | PathLike[str], *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Any:
    """Load a model that `save` wrote, bit for bit, in evaluation mode: an Encoder, a Decoder or an EncoderDecoder.

    A model that `kl.adapt` changed comes back as a model of its own class, with its recipe, also from a folder that its
    `save_pretrained` wrote. From a folder that one of our classes for Transformers wrote, it is the model inside.
    dtype: converts all weights; by default as saved.
    """
    path = as_path(folder, "the folder of the model")
    if kind_of(path / saved.CONFIG) is None and is_foreign(path):
        if is_wrapped(path):
            return load_wrapped(path, device=device, dtype=dtype)
        return load_adapted(path, device=device, dtype=dtype)
    return saved.load_model(path, device=device, dtype=dtype)
