"""Read a folder written by Transformers' `save_pretrained`: config.json and safetensors. Nothing is unpickled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from kilolayer.errors import InputError, shown
from kilolayer.files.paths import kind_of
from kilolayer.files.reading import read_json
from kilolayer.files.tensors import Expected, load_tensors

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def is_foreign(folder: Path) -> bool:
    """Whether this is a Hugging Face model folder."""
    return kind_of(folder / CONFIG) == "file"


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of config.json."""
    if not is_foreign(folder):
        raise InputError(
            f"the folder has no {CONFIG}", where=str(folder), fix="name a folder that `save_pretrained` of Transformers wrote"
        )
    found = read_json(folder / CONFIG)
    if not isinstance(found, dict):
        raise InputError(
            "the file does not hold a table", where=str(folder / CONFIG), fix="put the model's own config.json in its place"
        )
    return found


def read_tensors(folder: Path, expected: Expected) -> dict[str, Tensor]:
    """All weights under their names in the files. expected: what the files can hold."""
    if kind_of(folder / WEIGHTS) == "file":
        return _read_file(folder / WEIGHTS, expected)
    if kind_of(folder / INDEX) == "file":
        found: dict[str, Tensor] = {}
        for name in _parts(folder / INDEX):
            found |= _read_file(folder / name, replace(expected, number=range(expected.number.stop)))
        return found
    if any(kind_of(folder / name) == "file" for name in PICKLED):
        raise InputError(
            f"the weights are pickled, and pickles are not read because they can run any program; there is no {WEIGHTS}",
            where=str(folder),
            fix="if you trust it, convert it with Transformers: AutoModel.from_pretrained(folder).save_pretrained(folder)",
        )
    raise InputError(f"the folder has no {WEIGHTS}", where=str(folder), fix="write it with save_pretrained of Transformers")


def _parts(index: Path) -> list[str]:
    """The files that an index lists, without repetition."""
    table = read_json(index)
    names = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(names, dict) or not names:
        raise InputError(
            "the index does not name any files", where=str(index), fix="write it with save_pretrained of Transformers"
        )
    for name in names.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError(
                f"{shown(name)} is not the name of a file next to the index", where=str(index), fix="correct the index"
            )
    return sorted(set(names.values()))


def _read_file(path: Path, expected: Expected) -> dict[str, Tensor]:
    return load_tensors(
        path, expected=expected, fix=f"fetch the file and {CONFIG} again: it may have been cut off, or of another model"
    )
