"""Mutations of Hugging Face folders, seeded: tensors of other ranks and dtypes, JSON of other types, fields of other kinds."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from tests.faults.odd_values import JSON_VALUES

ODD_TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "0-d": lambda tensor: tensor.flatten()[0],
    "1-d": lambda tensor: tensor.flatten(),
    "2-d": lambda tensor: tensor[None] if tensor.dim() == 1 else tensor.t().contiguous(),
    "3-d": lambda tensor: tensor.reshape(*tensor.shape, *[1] * (3 - tensor.dim())),
    "no rows": lambda tensor: tensor[:0],
    "one row more": lambda tensor: torch.cat([tensor, tensor[:1]]),
    "fp8": lambda tensor: tensor.to(torch.float8_e4m3fn),
    "complex": lambda tensor: tensor.to(torch.complex64),
    "int64": lambda tensor: tensor.long(),
    "bool": lambda tensor: tensor.bool(),
    "fp64": lambda tensor: tensor.double(),
    "bf16": lambda tensor: tensor.bfloat16(),
}
WEIGHTS = "model.safetensors"


def mutate(whole: Path, folder: Path, dice: random.Random) -> str:
    """Copy a folder with one odd tensor, JSON value or SentencePiece field; return what is odd."""
    shutil.copytree(whole, folder)
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".json", ".spm", ".safetensors"))
    path = folder / dice.choice(names)
    if path.suffix == ".json":
        return f"{path.name}: {_odd_json(path, dice)}"
    if path.suffix == ".spm":
        data = _odd_message(path.read_bytes(), dice)
        path.write_bytes(data)
        return f"{path.name}: {len(data)} bytes"
    tensors = safetensors.torch.load_file(path)
    name, kind = dice.choice(sorted(tensors)), dice.choice(list(ODD_TENSORS))
    safetensors.torch.save_file({**tensors, name: ODD_TENSORS[kind](tensors[name]).clone()}, path)
    return f"{name}: {kind}"


def _odd_json(path: Path, dice: random.Random) -> str:
    """Replace a value anywhere in a JSON file."""
    table = json.loads(path.read_text())
    inner, above = table, []
    while isinstance(inner, dict | list) and inner and (not above or dice.random() < 0.7):
        key = dice.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        above.append((inner, key))
        inner = inner[key]
    mark, value = "<odd value>", dice.choice(JSON_VALUES)
    holder, key = above[-1]
    holder[key] = mark
    path.write_text(json.dumps(table).replace(json.dumps(mark), value))
    return f"{[each for _, each in above]} is {value[:50]}"


def _odd_message(data: bytes, dice: random.Random) -> bytes:
    """A protocol buffer message with some bytes of another value, a field of another kind, or an end in its middle."""
    place = dice.randrange(min(len(data), 400))  # the pieces come first
    match dice.randrange(4):
        case 0:
            return data[:place]
        case 1:
            return data[:place] + bytes([data[place] & ~7 | dice.randrange(8)]) + data[place + 1 :]
        case 2:
            return data[:place] + b"\xff" * dice.choice([1, 9, 5000]) + data[place:]
        case _:
            field = dice.choice([b"\x08\x05", b"\x0d\0\0\0\0", b"\x09" + b"\0" * 8, b"\x0a\x02\x08\x05", b"\x0a\x04\x12\x02ab"])
            return field + data


def edited_json(path: Path, edit: Callable[[Any], None]) -> None:
    """Change the table of a JSON file in place."""
    table = json.loads(path.read_text())
    edit(table)
    path.write_text(json.dumps(table))
