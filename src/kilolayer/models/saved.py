"""Save and load a model without a run: a folder with config.toml (the table [model]) and model.safetensors (the weights)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kilolayer import config as configuration
from kilolayer.errors import InputError, OptionError, file_fault
from kilolayer.files.paths import as_path, did_you_mean, kind_of
from kilolayer.files.reading import read_text
from kilolayer.files.tensors import load_tensors, write_tensors
from kilolayer.files.writing import PART, draft_of, make_folder, move, remove, unwritable, write
from kilolayer.layers.embedding import Embedding
from kilolayer.layers.patches import PatchProjection
from kilolayer.models.build import build_model
from kilolayer.models.config import ModelConfig
from kilolayer.models.decoder import Decoder
from kilolayer.models.device import check_device, check_dtype
from kilolayer.models.encoder import Encoder
from kilolayer.models.encoder_decoder import EncoderDecoder
from kilolayer.models.fit import expected_weights, find_misfit
from kilolayer.models.model import Model
from kilolayer.models.sharded import write_once
from kilolayer.moe.shard import refuse_part

CONFIG, WEIGHTS = "config.toml", "model.safetensors"
DRAFTS = f".{WEIGHTS}.*{PART}"
"""Pattern of the temporary files that an interrupted `save` leaves behind."""


def save(model: Model, folder: str | PathLike[str]) -> Path:
    """Save a model to a new or empty folder, or over a model saved before; return the folder.

    Each tensor is written once, in its own dtype: parameters, and buffers such as Admin's calibrated scales. At any time, even
    after a kill, the folder holds the old model, the new one, or no weights at all.
    """
    config, folder = configuration.dump(_table_of(model)), as_path(folder, "the folder of the model")

    def write(tensors: dict[str, Tensor]) -> None:
        check_folder(folder, CONFIG, _read_config)
        write_model(folder, CONFIG, config, tensors)

    write_once(model, tensors_of, write)
    return folder


def write_model(folder: Path, name: str, config: str, tensors: Mapping[str, Tensor]) -> None:
    """Write a model's configuration, to a file of this name, and its weights beside it."""
    make_folder(folder)
    try:
        # The draft of an interrupted save stays, as a sign that a folder without weights is a model's.
        with draft_of(folder / WEIGHTS, stays=True) as draft:
            write_tensors(draft, tensors)
            if kind_of(folder / name) != "file" or read_text(folder / name) != config:
                # Old weights could fit the new configuration and be loaded with it, so they are removed first.
                remove(folder / WEIGHTS)
                write(folder / name, config)
            move(draft, folder / WEIGHTS)
    except OSError as error:
        raise unwritable(folder / WEIGHTS, error) from None


def load_model(
    folder: str | PathLike[str], *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Encoder | Decoder | EncoderDecoder:
    """Load a model that `save` wrote, bit for bit, in evaluation mode. dtype: converts all weights; by default as saved."""
    folder, target = as_path(folder, "the folder of the model"), check_device(device or "cpu")
    if dtype is not None:
        check_dtype(dtype)
    config, states_dtype = _read_config(folder)
    path = folder / WEIGHTS
    if kind_of(path) is None:
        raise InputError(
            f"the model is incomplete: there is no {WEIGHTS}",
            where=str(folder),
            fix="restore the file; if saving was interrupted, save the model again",
        )

    def check(outline: Mapping[str, Tensor]) -> None:
        if misfit := find_misfit(tensors_of(build_model(config, device="meta", seed=0)), outline):
            raise InputError(
                f"the weights do not fit the configuration: {misfit}",
                where=str(path),
                fix=f"use the {CONFIG} and the {WEIGHTS} of the same model",
            )

    tensors = load_tensors(
        path,
        str(target),
        expected=expected_weights(config),
        check=check,
        fix=f"the file is damaged, or not of the same model as {CONFIG}: save the model again",
    )
    model = build_model(config, device="meta", seed=0)
    for name, tensor in tensors.items():
        _assign(model, name, tensor)
    _set_states_dtype(model, states_dtype)
    if dtype is not None:
        _set_states_dtype(model, None)
        model.to(dtype)
    return model.eval()


def is_saved(folder: Path) -> bool:
    """Whether a folder holds a model that `save` wrote, rather than a run."""
    path = folder / CONFIG
    return kind_of(path) == "file" and set(configuration.load(path)) <= {"model", "states_dtype"}


def _table_of(model: Model) -> configuration.Table:
    """The contents of config.toml; raises if the model could not be rebuilt from them."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise InputError(
            "DistributedDataParallel is not a Kilolayer model", where="kl.save", fix="give the model inside it: wrapper.module"
        )
    if not isinstance(model, Model):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            f"{type(model).__name__} is not a Kilolayer model",
            where="kl.save",
            fix="give an Encoder, a Decoder, an EncoderDecoder or a model that kl.adapt has changed, and then the folder; "
            "a run's is kl.load(folder).model",
        )
    refuse_part(model)
    tensors = tensors_of(model)
    if any(tensor.is_meta for tensor in tensors.values()):
        raise InputError("the model has no weights yet: it is on the meta device", fix="call model.materialize(device) first")
    table = {"model": configuration.table_of(model.config)}
    if misfit := find_misfit(tensors, tensors_of(build_model(table["model"], device="meta", seed=0))):
        raise InputError(
            f"the model is not the one that its configuration describes: {misfit}",
            fix="save model.state_dict() with safetensors: a module of your own is in no configuration",
        )
    inputs = (module for module in model.modules() if isinstance(module, Embedding | PatchProjection))
    states = next((module.states_dtype for module in inputs), None)
    return table if states is None else {**table, "states_dtype": str(states).removeprefix("torch.")}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, each once, including buffers that are not in the state dict, such as per-layer constants."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _assign(model: Model, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(tensor)
    else:
        module._buffers[leaf] = tensor


def _set_states_dtype(model: Model, dtype: torch.dtype | None) -> None:
    """Set the dtype of the states between layers, which in a lowered model differs from that of the embedding table."""
    for module in model.modules():
        if isinstance(module, Embedding | PatchProjection):
            module.states_dtype = dtype


def check_folder(folder: Path, config: str, read: Callable[[Path], Any]) -> None:
    """Raise if the folder holds anything but a saved model whose configuration has this name, and which `read` can read."""
    kind = kind_of(folder)
    if kind is None:
        return
    if kind != "folder":
        raise InputError("this is a file", where=str(folder), fix="name a folder")
    try:
        names = {name for name in os.listdir(folder) if not name.endswith(PART)}
    except OSError as error:
        reason, fix = file_fault(error)
        raise InputError(f"the folder cannot be read: {reason}", where=str(folder), fix=fix) from None
    if names == {config, WEIGHTS} or (names == {config} and any(folder.glob(DRAFTS))):
        read(folder)
    elif names:
        raise InputError("the folder holds something else", where=str(folder), fix="choose a new folder, or empty this one")


def _read_config(folder: Path) -> tuple[ModelConfig, torch.dtype | None]:
    """Read the model's configuration, and the dtype of the states between layers if the model was lowered."""
    path = folder / CONFIG
    if kind_of(path) != "file":
        absent = f"the folder does not exist{did_you_mean(folder)}" if kind_of(folder) is None else f"there is no {CONFIG}"
        raise InputError(f"this is not a saved model: {absent}", where=str(folder), fix="name a folder that kl.save wrote")
    table = configuration.load(path)
    states = table.pop("states_dtype", None)
    if set(table) != {"model"} or not isinstance(table["model"], dict):
        raise InputError(
            "this is not a saved model: its configuration is not a model's",
            where=str(path),
            fix="a run's model is kl.load(folder).model",
        )
    try:
        config = configuration.build(ModelConfig, table["model"], "model")
    except OptionError as error:
        raise error.at(f"in {path}") from None
    known = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    dtypes = {None: None, **{str(dtype).removeprefix("torch."): dtype for dtype in known}}
    if not isinstance(states, str | None) or states not in dtypes:
        raise InputError(f"states_dtype is {states!r}", where=str(path), fix="restore the file that kl.save wrote")
    return config, dtypes[states]
