"""Save and load an adapted model: config.json, which describes its class and its recipe, and model.safetensors."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kilolayer import recipes
from kilolayer.errors import InputError, KilolayerError, shown
from kilolayer.files.paths import as_path, kind_of
from kilolayer.files.reading import read_json
from kilolayer.files.tensors import Expected
from kilolayer.models.adapt import torch_classes, transformers_classes
from kilolayer.models.adapt.adapt import attach, check_fit
from kilolayer.models.adapt.pretrained import ENTRY, entry_of
from kilolayer.models.adapt.stacks import find
from kilolayer.models.device import check_device, check_dtype
from kilolayer.models.fit import find_misfit
from kilolayer.models.pretrained_folder import CONFIG, read_config, read_tensors
from kilolayer.models.saved import check_folder, tensors_of, write_model
from kilolayer.models.sharded import write_once
from kilolayer.torch_state import own_torch_state

GENERATION = "generation_config.json"
LARGEST_COMPUTED = 1 << 22
"""The numbers in tables of positions that are computed whatever the size of the model."""
TENSORS = Expected(range(100_001))
"""Numbers of tensors in a file: up to some thousands of layers of any class."""


def save_adapted(model: nn.Module, folder: str | PathLike[str]) -> Path:
    """Save an adapted model to a new or empty folder, or over one saved before; return the folder."""
    folder = as_path(folder, "the folder of the model")
    tensors = tensors_of(model)
    if any(tensor.is_meta for tensor in tensors.values()):
        raise InputError("the model has no weights: it is on the meta device", fix="load its weights first")
    table = torch_classes.describe(model) or transformers_classes.describe(model)
    if table is None:
        raise InputError(
            f"{type(model).__name__} is a class of your own, which no file can describe",
            where="kl.save",
            fix=f"save the adapted model inside it, or {torch_classes.OWN_MODULE}",
        )
    table[ENTRY] = {**entry_of(model), **transformers_classes.generation_of(model)}
    # Through JSON, as it will be read.
    config = json.dumps(table, indent=2, sort_keys=True) + "\n"
    if misfit := find_misfit(tensors, tensors_of(_outline(json.loads(config), len(tensors)))):
        raise InputError(
            f"the model is not the one that its class builds: {misfit}", where="kl.save", fix=torch_classes.OWN_MODULE
        )

    def write(whole: dict[str, Tensor]) -> None:
        check_folder(folder, CONFIG, _read_table)
        # Copied, because buffers may share their memory, which a safetensors file cannot hold.
        buffers = {name: whole[name].clone() for name, _ in model.named_buffers()}
        write_model(folder, CONFIG, config, whole | buffers)

    write_once(model, tensors_of, write)
    return folder


def load_adapted(
    folder: str | PathLike[str], *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Any:
    """Load a model that `save_adapted` or `save_pretrained` of an adapted model wrote, in evaluation mode, with its recipe.

    dtype: converts all weights; by default as saved.
    """
    folder, target = as_path(folder, "the folder of the model"), check_device(device or "cpu")
    if dtype is not None:
        check_dtype(dtype)
    table, tensors = _read_table(folder), read_tensors(folder, TENSORS)
    if "generation" not in table[ENTRY] and kind_of(folder / GENERATION) == "file":
        table[ENTRY]["generation"] = read_json(folder / GENERATION)
    try:
        outline = _outline(table, len(tensors))
        if misfit := find_misfit(_expected(outline, tensors), tensors):
            raise InputError(f"the weights do not fit the configuration: {misfit}", fix="use the files of the same model")
        _check_computed(outline, tensors)
        with own_torch_state("kl.load_model", devices=[]):
            model = _build(table, len(tensors), "cpu")
        # Before the recipe, whose constants take the dtype of the weights beside them.
        _assign(model, tensors, dtype)
        _give_recipe(model, table)
    except KilolayerError as error:
        raise error.at(str(folder / CONFIG)) from None
    _assign(model, tensors, dtype)
    return model.to(target).eval()


def _read_table(folder: Path) -> dict[str, Any]:
    """The contents of config.json; raises if they do not describe an adapted model."""
    table = read_config(folder)
    if not isinstance(table.get(ENTRY), dict):
        raise InputError(
            "this is a model without a recipe of Kilolayer",
            where=str(folder / CONFIG),
            fix="load it with from_pretrained of Transformers, or as a model of Kilolayer with kl.from_huggingface",
        )
    return table


def _outline(table: dict[str, Any], most_layers: int) -> nn.Module:
    """The model that a table describes, with its recipe, on the meta device."""
    model = _build(table, most_layers, "meta")
    _give_recipe(model, table)
    return model


def _build(table: dict[str, Any], most_layers: int, device: str) -> nn.Module:
    """The model that a table describes, without its recipe, and with weights of no use. most_layers: the limit of a stack."""
    described = {name: value for name, value in table.items() if name != ENTRY}
    with torch.device(device):
        if table.get("model_type") == torch_classes.NAME:
            return torch_classes.build(described, most_layers)
        return transformers_classes.build(described, table[ENTRY], most_layers)


def _give_recipe(model: nn.Module, table: dict[str, Any]) -> None:
    described = table[ENTRY].get("recipe")
    if not isinstance(described, dict):
        raise InputError(f"the recipe is {shown(described)}", fix="restore the file")
    found, recipe = find(model), recipes.parse(described)
    check_fit(found, recipe)
    attach(model, found, recipe)


def _expected(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `model` that are in the files, and those that must be there; a shared one, under one of its names."""
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    present = {id(tensor) for name, tensor in named.items() if name in tensors}
    needed = set(model.state_dict()) - _computed(model)
    return {name: tensor for name, tensor in named.items() if name in tensors or (name in needed and id(tensor) not in present)}


def _computed(model: nn.Module) -> set[str]:
    """The names of tables of positions that a class computes and does not save."""
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())


def _check_computed(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Raise if the tables that will be computed are larger than a model of this size can have."""
    own = dict(model.named_parameters())
    size = sum(own[name].numel() for name in _computed(model) if name in own and name not in tensors)
    if size > max(LARGEST_COMPUTED, sum(tensor.numel() for tensor in tensors.values())):
        raise InputError(f"the tables of positions have {size:,} numbers, more than all weights", fix="restore the file")


@torch.no_grad()
def _assign(model: nn.Module, tensors: dict[str, Tensor], dtype: torch.dtype | None) -> None:
    """Give `model` those of these tensors that it has, in its own parameters, which several modules may share."""
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    saved, given = set(model.state_dict()), set[int]()
    for name, tensor in tensors.items():
        if name in named:
            converted = dtype is not None and tensor.is_floating_point() and name in saved
            named[name].data = tensor.to(dtype) if converted else tensor
            given.add(id(named[name]))
    usual = dtype or next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), None)
    for parameter in model.parameters():
        if id(parameter) not in given:
            parameter.data = parameter.data.to(usual)
