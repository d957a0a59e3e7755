"""Reads and writes safetensors files, which contain no code."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import safetensors.torch
from torch import Tensor

from kilolayer.errors import InputError
from kilolayer.files.reading import open_regular
from kilolayer.files.writing import PART, sync, unwritable


def load_tensors(path: Path, device: str = "cpu", *, fix: str = "use a checkpoint of a run") -> dict[str, Tensor]:
    """The tensors of a safetensors file; anything else is refused before memory is allocated."""
    try:
        with open_regular(path):
            return safetensors.torch.load_file(path, device=device)
    except (KeyError, TypeError, ValueError, safetensors.SafetensorError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"not a safetensors file: {error}", where=str(path), fix=fix) from None


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file atomically and durably; tensors must not share memory."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART}")
    try:
        safetensors.torch.save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, draft)
        sync(draft)
        os.replace(draft, path)
        sync(path.parent)
    except (OSError, safetensors.SafetensorError) as error:
        raise unwritable(path, error if isinstance(error, OSError) else ValueError(str(error))) from None
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
