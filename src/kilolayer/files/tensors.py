"""Reads and writes safetensors files, which contain no code."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from kilolayer.errors import InputError
from kilolayer.files.reading import open_regular
from kilolayer.files.writing import remove, unwritable, write_parts

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names of dtypes in safetensors files."""
ANY_NUMBER = range(2_000_001)
"""Numbers of tensors in a file if nothing is known of what it holds: up to the optimizer's state of the deepest models."""
LONGEST_ENTRY, LONGEST_METADATA = 300, 1 << 20
"""Bytes of a header: for each tensor, and for everything else."""
MORE_BRACES = 1000
"""Opening braces in a header that do not begin a tensor: those of its metadata."""


def load_tensors(
    path: Path, device: str = "cpu", *, number: range = ANY_NUMBER, fix: str = "use a checkpoint of a run"
) -> dict[str, Tensor]:
    """The tensors of a safetensors file; anything else, and tensors that no model here can use, are refused.

    number: how many tensors there can be; the header of a file with fewer or more is not parsed.
    """
    try:
        with open_regular(path) as file:
            if (wrong := _other_number(file, number)) is not None:
                raise InputError(f"the file holds {wrong}", where=str(path), fix=fix)
            found = safetensors.torch.load_file(path, device=device)
    except (KeyError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise _unusable(error, path, fix) from None
    for name, tensor in found.items():
        if tensor.dtype not in DTYPES:
            raise InputError(
                f"the tensor {name} is of {str(tensor.dtype).removeprefix('torch.')}, which is not supported",
                where=str(path),
                fix="convert it to float32, bfloat16 or float16, and save it again",
            )
    return found


def _other_number(file: io.BufferedReader, number: range) -> str | None:
    """How the number of tensors in a safetensors file differs from what is expected, by the braces in its header."""
    size = os.fstat(file.fileno()).st_size
    first = file.read(8)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > size - 8:
        raise ValueError("its header is cut off")
    text = file.read(length) if length <= LONGEST_ENTRY * number.stop + LONGEST_METADATA else b""
    if len(text) < length or text.count(b"{") >= number.stop + MORE_BRACES:
        return f"more than the {number.stop - 1:,} tensors that can be expected here"
    if text.count(b"{") < number.start:
        return f"fewer than the {number.start:,} tensors that must be expected here"
    return None


def _unusable(error: Exception, path: Path, fix: str) -> InputError:
    return error if isinstance(error, InputError) else InputError(f"not a safetensors file: {error}", where=str(path), fix=fix)


def check_alike(given: Mapping[str, Tensor], ours: Mapping[str, Tensor], where: Path | str) -> None:
    """Raise unless both have tensors of the same names, shapes and dtypes."""
    for name in sorted(given.keys() | ours.keys()):
        there, here = (_kind(tensors.get(name)) for tensors in (given, ours))
        if there != here:
            raise InputError(
                f"the checkpoint does not fit: {name} is {there} there and {here} here",
                where=str(where),
                fix="use checkpoints of one run, with its own configuration",
            )


def _kind(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")


def write_tensors(draft: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file into a draft; if that fails, no draft remains."""
    try:
        write_parts(draft, serialise(tensors))
    except OSError as error:
        remove(draft)
        raise unwritable(draft, error) from None


def serialise(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The parts of a safetensors file: its header, and the bytes of each tensor."""
    header, ordered = _header(tensors)
    yield header
    for tensor in ordered:
        yield tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def file_size(tensors: Mapping[str, Tensor]) -> int:
    """The size in bytes of the safetensors file of these tensors."""
    return len(_header(tensors)[0]) + sum(tensor.nbytes for tensor in tensors.values())


def _header(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[Tensor]]:
    """The header with its length, and the tensors in their order in the file."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # so that each is aligned
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [tensor for _, tensor in ordered]
