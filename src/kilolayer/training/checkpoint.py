"""Checkpoints that are whole or absent: safetensors and JSON, each file hashed, written beside and renamed.

    checkpoints/step-00001000/ {model.safetensors, optimizer.safetensors, state.json, manifest.json}

The manifest is written last and names every file with its size and the SHA-256 of each 64 MiB of it, which several threads
write and check: one would need a minute for a thousand layers. A folder that does not match its manifest does not exist for a
resume: the one before it serves.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from multiprocessing.pool import ThreadPool  # its threads, unlike those of futures, do not hold up the end of the process
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from kilolayer import __version__
from kilolayer.errors import InputError, KilolayerError

logger = logging.getLogger(__name__)

PIECE = 1 << 26
"""Bytes of a file that are hashed as one."""
THREADS = min(8, os.cpu_count() or 1)
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
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
"""As safetensors files name them."""


class CheckpointError(KilolayerError):
    """A checkpoint could not be written or read."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a run needs to go on: weights and buffers, optimizer and random state, and small values."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write `checkpoint` below `folder`; on any failure nothing of it stays."""
    final = path_of(folder, checkpoint.step)
    partial = folder / f".{final.name}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        contents = (_serialise(checkpoint.model), _serialise(checkpoint.optimizer), [json.dumps(checkpoint.state).encode()])
        manifest = {
            "step": checkpoint.step,
            "versions": {"kilolayer": __version__, "torch": torch.__version__},
            "files": {name: _write(partial / name, parts) for name, parts in zip(FILES, contents, strict=True)},
        }
        _write(partial / "manifest.json", [json.dumps(manifest, indent=1).encode()])
        _sync(partial)
        shutil.rmtree(final, ignore_errors=True)  # only a damaged one can be there
        partial.rename(final)
        _sync(folder)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        size = sum(tensor.nbytes for part in (checkpoint.model, checkpoint.optimizer) for tensor in part.values())
        raise CheckpointError(
            f"the checkpoint of step {checkpoint.step} could not be written: {error.strerror or error}",
            where=str(final),
            fix=f"it needs {size / 2**20:.0f} MiB; free space or choose another run folder. Older checkpoints are intact",
        ) from error
    return final


def prune(folder: Path, keep: int, also: set[int]) -> None:
    """Delete all but the newest `keep` checkpoints and those of the steps `also`; called after a verified save."""
    for leftover in folder.glob(".step-*"):  # of a process that was killed as it wrote or deleted
        shutil.rmtree(leftover, ignore_errors=True)
    for path in sorted(steps(folder), reverse=True)[keep:]:
        if step_of(path) not in also:
            # Renamed first: a delete that is cut short leaves no folder that looks like a checkpoint.
            doomed = path.with_name(f".{path.name}.deleted")
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def steps(folder: Path) -> list[Path]:
    """The folders of checkpoints, oldest first, whole or not."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir() and path.name.removeprefix("step-").isdigit())


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix("step-"))


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint; a damaged one is named in the log and passed over."""
    for path in reversed(steps(folder)):
        fault = find_fault(path)
        if fault is None:
            return path
        logger.warning("checkpoint of step %d is damaged (%s); falling back to the one before", step_of(path), fault)
    return None


def find_fault(path: Path) -> str | None:
    """What is wrong with a checkpoint; None where every file is as its manifest says."""
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        files = manifest["files"]
        if manifest["step"] != step_of(path) or set(files) != set(FILES):
            return "manifest.json does not describe it"
        for name in FILES:
            if not (path / name).is_file():
                return f"{name} is missing"
            if (difference := _difference(_fingerprint(path / name), files[name])) is not None:
                return f"{name} has {difference}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"manifest.json cannot be read: {error}"
    return None


def _difference(found: dict[str, Any], written: dict[str, Any]) -> str | None:
    """Where a file is not what was written; None where it is."""
    pairs = zip_longest(found["sha256"], written["sha256"], fillvalue="nothing")
    for number, (ours, theirs) in enumerate(pairs):
        if ours != theirs:
            return f"SHA-256 {ours[:12]}, not {theirs[:12]}, from byte {number * PIECE:,} on"
    return None if found["bytes"] == written["bytes"] else f"{found['bytes']:,} bytes, not {written['bytes']:,}"


def load(path: Path, device: str = "cpu") -> Checkpoint:
    """Read a checkpoint that `find_fault` has found whole."""
    fault = find_fault(path)
    if fault is not None:
        raise CheckpointError(f"the checkpoint is damaged: {fault}", where=str(path), fix="use another checkpoint")
    return Checkpoint(
        step_of(path),
        load_tensors(path / "model.safetensors", device),
        load_tensors(path / "optimizer.safetensors", device),
        load_state(path),
    )


def load_state(path: Path) -> dict[str, Any]:
    """The small values of a checkpoint."""
    return json.loads((path / "state.json").read_bytes())


def load_tensors(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """The tensors of a safetensors file; anything else is refused before memory is taken."""
    try:
        return safetensors.torch.load_file(path, device=device)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise InputError(f"not a safetensors file: {error}", where=str(path), fix="use a checkpoint of a run") from None


def average(paths: list[Path]) -> dict[str, Tensor]:
    """The mean of the weights of several checkpoints; what is not floating-point is the newest's."""
    mean: dict[str, Tensor] = {}
    for path in paths:
        for name, tensor in load_tensors(path / "model.safetensors").items():
            if tensor.is_floating_point():
                mean[name] = mean.get(name, torch.zeros_like(tensor, dtype=torch.float64)) + tensor.double() / len(paths)
            else:
                mean[name] = tensor
    dtypes = {name: tensor.dtype for name, tensor in load_tensors(paths[-1] / "model.safetensors").items()}
    return {name: tensor.to(dtypes[name]) for name, tensor in mean.items()}


def _serialise(tensors: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The parts of a safetensors file: the length of its header, the header, and the tensors as they lie in memory."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # each is aligned to its elements
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for _, tensor in ordered:
        yield tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _write(path: Path, parts: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write the parts one after the other; what `_fingerprint` says of the file where the disk has kept it."""
    pieces = _pieces(parts)
    with path.open("wb") as file, ThreadPool(THREADS) as pool:
        hashes = pool.map(partial(_write_piece, file.fileno()), enumerate(pieces), chunksize=1)
        os.fsync(file.fileno())
    return {"bytes": sum(len(part) for piece in pieces for part in piece), "sha256": hashes}


def _pieces(parts: Iterable[bytes | memoryview]) -> list[list[memoryview]]:
    """The parts, cut so that each piece but the last has PIECE bytes."""
    pieces: list[list[memoryview]] = [[]]
    room = PIECE
    for part in parts:
        rest = memoryview(part)
        while len(rest) > room:
            pieces[-1].append(rest[:room])
            pieces.append([])
            rest, room = rest[room:], PIECE
        pieces[-1].append(rest)
        room -= len(rest)
    return pieces


def _write_piece(descriptor: int, piece: tuple[int, list[memoryview]]) -> str:
    number, parts = piece
    digest, place = hashlib.sha256(), number * PIECE
    for part in parts:
        digest.update(part)
        rest = part
        while rest:
            count = os.pwrite(descriptor, rest, place)
            rest, place = rest[count:], place + count
    return digest.hexdigest()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file, ThreadPool(THREADS) as pool:
        size = os.fstat(file.fileno()).st_size
        places = range(0, max(size, 1), PIECE)
        return {"bytes": size, "sha256": pool.map(partial(_hash_piece, file.fileno()), places, chunksize=1)}


def _hash_piece(descriptor: int, start: int) -> str:
    digest, end = hashlib.sha256(), start + PIECE
    for place in range(start, end, 1 << 20):
        digest.update(os.pread(descriptor, min(1 << 20, end - place), place))
    return digest.hexdigest()
