"""Reads and writes safetensors files, which contain no code."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from kilolayer.errors import InputError
from kilolayer.files.reading import open_regular
from kilolayer.files.writing import remove, unwritable, write_parts
from kilolayer.terminal import human_bytes

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
LONGEST_ENTRY, LONGEST_METADATA = 300, 1 << 20
"""Bytes of a header: for each tensor, and for everything else."""
MORE_BRACES = 1000
"""Opening braces in a header that do not begin a tensor: those of its metadata."""


@dataclass(frozen=True)
class Expected:
    """What a file can hold: how many tensors, and at most how many bytes. By default, up to what the deepest models need."""

    number: range = range(2_000_001)
    size: int = 1 << 50


def load_tensors(
    path: Path,
    device: str = "cpu",
    *,
    expected: Expected | None = None,
    check: Callable[[Mapping[str, Tensor]], None] | None = None,
    fix: str = "use a checkpoint of a run",
) -> dict[str, Tensor]:
    """The tensors of a safetensors file; anything else, and tensors that no model here can use, are refused.

    expected: what the file can hold; the header of another one is not parsed. check: is given tensors of the same shapes on the
    meta device, and raises if these are not the ones that are wanted, before any of them is read.
    """
    with parsing(path, fix), open_regular(path) as file:
        header = read_header(file, expected or Expected())
        if check is not None:
            check(_outline(header))
        found = safetensors.torch.load_file(path, device=device)
    for name, tensor in found.items():
        if tensor.dtype not in DTYPES:
            raise InputError(
                f"the tensor {name} is of {str(tensor.dtype).removeprefix('torch.')}, which is not supported",
                where=str(path),
                fix="convert it to float32, bfloat16 or float16, and save it again",
            )
    return found


@contextmanager
def parsing(path: Path, fix: str) -> Iterator[None]:
    """A context in which what the contents of a file raise becomes an error that names the file."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except InputError as error:
        raise error if error.where else InputError(error.what, where=str(path), fix=fix) from None
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
        raise InputError(f"not a safetensors file: {error}", where=str(path), fix=fix) from None


def read_header(file: io.BufferedReader, expected: Expected) -> bytes:
    """The header of a safetensors file; raises if the file holds, by its size and the braces in its header, something else."""
    number, size = expected.number, os.fstat(file.fileno()).st_size
    if size > expected.size:
        raise InputError(
            f"the file holds {human_bytes(size)}, more than the {human_bytes(expected.size)} that can be expected here"
        )
    first = file.read(8)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > size - 8:
        raise ValueError("its header is cut off")
    text = file.read(length) if length <= LONGEST_ENTRY * number.stop + LONGEST_METADATA else b""
    if len(text) < length or text.count(b"{") >= number.stop + MORE_BRACES:
        raise InputError(f"the file holds more than the {number.stop - 1:,} tensors that can be expected here")
    if text.count(b"{") < number.start:
        raise InputError(f"the file holds fewer than the {number.start:,} tensors that must be expected here")
    return text


def _outline(header: bytes) -> dict[str, Tensor]:
    """The tensors that a header describes, on the meta device. Those of dtypes that are refused later count as fp32."""
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    return {
        name: torch.empty(entry["shape"], dtype=dtypes.get(entry["dtype"], torch.float32), device="meta")
        for name, entry in json.loads(header).items()
        if name != "__metadata__"
    }


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
        write_parts(draft, serialize(tensors))
    except OSError as error:
        remove(draft)
        raise unwritable(draft, error) from None


def serialize(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[bytes | memoryview]:
    """The parts of a safetensors file: its header, and the bytes of each tensor."""
    header, ordered = _header(tensors, metadata)
    yield header
    for tensor in ordered:
        yield tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def file_size(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> int:
    """The size in bytes of the safetensors file of these tensors."""
    return len(_header(tensors, metadata)[0]) + sum(tensor.nbytes for tensor in tensors.values())


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> tuple[bytes, list[Tensor]]:
    """The header with its length, and the tensors in their order in the file."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # so that each is aligned
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [tensor for _, tensor in ordered]
