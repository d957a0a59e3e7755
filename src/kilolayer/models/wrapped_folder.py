"""Read a folder that `save_pretrained` of one of our classes for Transformers wrote, without Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kilolayer.config import build
from kilolayer.errors import InputError, KilolayerError
from kilolayer.models.build import build_model
from kilolayer.models.config import ModelConfig
from kilolayer.models.device import check_device, check_dtype
from kilolayer.models.fit import expected_weights, find_misfit
from kilolayer.models.pretrained_folder import CONFIG, read_config, read_tensors

MODEL_TYPE, PREFIX = "kilolayer", "model."
"""What config.json names our classes, and what their weights' names begin with."""


def is_wrapped(folder: Path) -> bool:
    """Whether one of our classes for Transformers wrote the folder, which has a config.json."""
    return read_config(folder).get("model_type") == MODEL_TYPE


def load_wrapped(folder: Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Any:
    """The model inside the class, in evaluation mode. dtype: converts all weights; by default as saved."""
    target = check_device(device or "cpu")
    if dtype is not None:
        check_dtype(dtype)
    table = read_config(folder).get("model")
    if not isinstance(table, dict):
        raise InputError("there is no table of the model", where=str(folder / CONFIG), fix="restore the file")
    try:
        config = build(ModelConfig, table, "model")
    except KilolayerError as error:
        raise error.at(str(folder / CONFIG)) from None
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in read_tensors(folder, expected_weights(config)).items()}
    if misfit := find_misfit(build_model(config, device="meta", seed=0).state_dict(), tensors):
        raise InputError(
            f"the weights do not fit the configuration: {misfit}", where=str(folder), fix="use the files of the same model"
        )
    saved = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    model = build_model(config, dtype=dtype or saved, seed=0)  # constants by layer, which the files do not hold, are set here
    model.load_state_dict(tensors, assign=True)
    return (model if dtype is None else model.to(dtype)).to(target).eval()
