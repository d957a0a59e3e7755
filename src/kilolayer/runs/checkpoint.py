"""Checkpoints that are either complete or absent: safetensors and JSON files, hashed, written aside and renamed into place.

    checkpoints/step-00001000/ {model.safetensors, optimizer.safetensors, state.json, manifest.json}

Processes that share a model each write their own rows of it instead, to {model,optimizer}-00001-of-00004.safetensors and so on;
the first one completes the checkpoint when all have written theirs.

The manifest is written last. It lists every file with its size and the SHA-256 of each piece. A folder that does not match its
manifest is ignored when a run is resumed, and the checkpoint before it is used.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kilolayer.errors import InputError, KilolayerError, UnreadableError, WriteError, file_fault
from kilolayer.files.paths import kind_of
from kilolayer.files.reading import read_json, unreadable
from kilolayer.files.saved_tensors import SavedTensors, rows_metadata
from kilolayer.files.tensors import Expected, check_alike, file_size, load_tensors, serialize
from kilolayer.files.writing import make_folder, sync
from kilolayer.moe.full_state import owner
from kilolayer.parallel.collectives import on_all
from kilolayer.parallel.peers import Peers
from kilolayer.runs.hashed_file import fingerprint, offsets, write_hashed
from kilolayer.terminal import human_bytes
from kilolayer.version import VERSION

logger = logging.getLogger(__name__)

MODEL, OPTIMIZER, STATE = "model", "optimizer", "state.json"
FILES = (f"{MODEL}.safetensors", f"{OPTIMIZER}.safetensors", STATE)
MANIFEST = "manifest.json"
MOST_MANIFEST = 1 << 24
MOST_STATE = 1 << 28
PER_WEIGHT = 9
"""The optimizer's state has fewer tensors than this for each one of the model."""
NAME = re.compile("step-(?:[0-9]{8}|[1-9][0-9]{8,17})")
REPLACED = ".replaced"
FindFault = Callable[[Path], str | None]
Check = Callable[[Mapping[str, Tensor]], None]


class CheckpointError(KilolayerError):
    """A checkpoint could not be written or read."""


@dataclass(frozen=True)
class Part:
    """What a process holds of a checkpoint that several write: which of `count` parts; one from there on is empty.

    rows: of each weight that it does not hold whole, the first row here and how many there are in all. NAME/mean and the like
    are divided as NAME is.
    """

    index: int = 0
    count: int = 1
    rows: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def metadata(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """The metadata of a file with these tensors."""
        return rows_metadata(
            {
                name: (self.rows[owner(name)][0], [self.rows[owner(name)][1], *tensor.shape[1:]])
                for name, tensor in tensors.items()
                if owner(name) in self.rows
            }
        )


@dataclass(frozen=True)
class Checkpoint:
    """Everything needed to resume a run: weights and buffers, optimizer and random state, and small values.

    part: what the tensors are of it; by default all.
    """

    step: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    state: dict[str, Any]
    part: Part = field(default_factory=Part)

    @property
    def files(self) -> dict[str, Mapping[str, Tensor]]:
        """The tensors by the name of the file that they are written to."""
        if self.part.index >= self.part.count:
            return {}
        kinds = {MODEL: self.model, OPTIMIZER: self.optimizer}
        return {_file_name(kind, self.part.index, self.part.count): tensors for kind, tensors in kinds.items()}


def save(folder: Path, checkpoint: Checkpoint, group: Peers | None = None) -> Path:
    """Write `checkpoint` below `folder` and return its path; if anything fails, no part of it remains.

    group: the processes that each write a part; all call this at the same time, and an error of one is raised on all.
    """
    final, first = path_of(folder, checkpoint.step), group is None or group.rank == 0
    partial, replaced = (folder / f".{final.name}{end}" for end in (".partial", REPLACED))
    sizes: list[list[int]] = []

    def begin() -> list[int]:
        if first:
            make_folder(folder)
            for leftover in (partial, replaced):
                remove(leftover)
            partial.mkdir()
        return _sizes(checkpoint)

    def write() -> dict[str, Any]:
        part = checkpoint.part
        return {
            name: write_hashed(partial / name, serialize(tensors, part.metadata(tensors)))
            for name, tensors in checkpoint.files.items()
        }

    def complete() -> None:
        if first:
            of_state = write_hashed(partial / STATE, [json.dumps(checkpoint.state).encode()])
            manifest = {
                "step": checkpoint.step,
                "versions": {"kilolayer": VERSION, "torch": torch.__version__},
                "files": {name: entry for each in written for name, entry in each.items()} | {STATE: of_state},
            }
            write_hashed(partial / MANIFEST, [json.dumps(manifest, indent=1).encode()])
            sync(partial)
            if os.path.lexists(final):
                final.rename(replaced)
            partial.rename(final)
            sync(folder)
            remove(replaced)

    try:
        sizes = on_all(begin, group)
        written = on_all(write, group)
        on_all(complete, group)
    except BaseException as error:
        if first:
            remove(partial)
            recover(folder)
        if not isinstance(error, OSError | WriteError):
            raise
        raise _unsaved(error, final, [size for each in sizes or [_sizes(checkpoint)] for size in each]) from error
    return final


def recover(folder: Path) -> None:
    """Restore a checkpoint whose replacement by another one of the same step was interrupted."""
    for replaced in folder.glob(f".step-*{REPLACED}"):
        final = replaced.with_name(replaced.name[1:].removesuffix(REPLACED))
        with suppress(OSError):
            if not os.path.lexists(final):
                replaced.rename(final)


def remove(path: Path) -> None:
    """Delete a folder and its contents, as far as possible; of a symbolic link, only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _unsaved(error: OSError | WriteError, final: Path, sizes: list[int]) -> CheckpointError:
    reason = error.what if isinstance(error, WriteError) else error.strerror or str(error)
    fix = error.fix if isinstance(error, WriteError) else file_fault(error)[1]
    with suppress(OSError):
        disk = os.statvfs(final.parent)
        need = sum(-(-size // disk.f_frsize) * disk.f_frsize for size in sizes)  # in blocks of the disk
        free = disk.f_bavail * disk.f_frsize
        room = f"it needs {human_bytes(need)}, and {human_bytes(free)} are free"
        if getattr(error, "errno", None) == errno.ENOSPC and disk.f_files and disk.f_favail < len(sizes):
            room = "no more files can be created there, as `df -i` shows: delete some"
        fix = f"{room}; {fix}"
    return CheckpointError(
        f"the checkpoint of step {step_of(final)} could not be written: {reason}",
        where=error.where if isinstance(error, WriteError) else str(final),
        fix=f"{fix}. Older checkpoints are intact",
    )


def _sizes(checkpoint: Checkpoint) -> list[int]:
    """The sizes in bytes of what a process writes; the first one also writes the values, the manifest and the folder."""
    of_tensors = [file_size(tensors, checkpoint.part.metadata(tensors)) for tensors in checkpoint.files.values()]
    return of_tensors if checkpoint.part.index else [*of_tensors, len(json.dumps(checkpoint.state)), 1, 1]


def steps(folder: Path) -> list[Path]:
    """The checkpoints, oldest first, complete or not: whatever has the name of one."""
    try:
        found = [folder / name for name in os.listdir(folder) if NAME.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        # Do not return an empty list: a run whose checkpoints cannot be listed must not start again from the beginning.
        raise unreadable(folder, error) from None
    return sorted(found, key=step_of)


def path_of(folder: Path, step: int) -> Path:
    """The folder of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint folder."""
    return int(path.name.removeprefix("step-"))


def newest(folder: Path, find: FindFault | None = None) -> Path | None:
    """The newest complete checkpoint. A damaged one is logged and skipped; one that cannot be read raises."""
    for path in reversed(steps(folder)):
        fault = (find or find_fault)(path)
        if fault is None:
            return path
        logger.warning("checkpoint of step %d is damaged (%s); falling back to the one before", step_of(path), fault)
    return None


def find_fault(path: Path, expected: Expected | None = None, group: Peers | None = None) -> str | None:
    """What is wrong with a checkpoint; None if every file matches the manifest. Raises if a file cannot be read.

    expected: what the file of the weights can hold; a larger one is not hashed. group: processes that each check some of the
    files; all call this at the same time.
    """
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    return next(filter(None, on_all(lambda: _find_fault(path, expected or Expected(), rank, size), group)), None)


def _find_fault(path: Path, expected: Expected, rank: int, size: int) -> str | None:
    """`find_fault` of every file with an index of rank, rank + size, ..."""
    if kind_of(path) != "folder":
        return "it is not a folder"
    try:
        _size_of(path / MANIFEST)
        match read_json(path / MANIFEST, MOST_MANIFEST):
            case {"step": step, "files": dict(files)} if step == step_of(path) and set(files) == _names(_count(files)):
                most = {MODEL: expected.size, OPTIMIZER: PER_WEIGHT * expected.size, STATE: MOST_STATE}
                for name in sorted(files)[rank::size]:
                    _check_file(path / name, files[name], next(most[kind] for kind in most if name.startswith(kind)))
            case _:
                return f"{MANIFEST} does not describe it"
    except UnreadableError:
        raise
    except InputError as error:
        return f"{Path(error.where).name} has a fault: {error.what}" if error.where else error.what
    return None


def _count(files: Mapping[str, Any]) -> int:
    """In how many parts a checkpoint with these files is."""
    return max(1, len(files) // 2)


def _names(count: int) -> set[str]:
    """The files of a checkpoint in this many parts."""
    return {STATE, *(_file_name(kind, index, count) for kind in (MODEL, OPTIMIZER) for index in range(count))}


def _file_name(kind: str, index: int, count: int) -> str:
    return f"{kind}.safetensors" if count == 1 else f"{kind}-{index + 1:05d}-of-{count:05d}.safetensors"


def _check_file(path: Path, written: Any, most: int) -> None:
    match written:
        case {"bytes": int(size), "sha256": [str(first), *_] as hashes} if all(isinstance(each, str) for each in hashes):
            actual = _size_of(path)
        case _:
            raise InputError(f"{MANIFEST} does not describe {path.name}")
    # Checked before the hashes, because a file that is not ours may be very long.
    if actual != size or len(hashes) != len(offsets(size)):
        raise InputError(f"{path.name} has {actual:,} bytes, not {size:,} with SHA-256 {first[:12]}")
    if size > most:
        raise InputError(f"{path.name} has {size:,} bytes, and {most:,} can be expected")
    for number, (ours, theirs) in enumerate(zip(fingerprint(path)["sha256"], hashes, strict=False)):
        if ours != theirs:
            raise InputError(f"{path.name} has SHA-256 {ours[:12]}, not {theirs[:12]}, from byte {offsets(size)[number]:,} on")


def _size_of(path: Path) -> int:
    """The size of a file in bytes; a symbolic link is refused."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise InputError(f"{path.name} is missing") from None
    except OSError as error:
        raise unreadable(path, error) from None
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path.name} is not a regular file")
    return status.st_size


def load(
    path: Path,
    find: FindFault | None = None,
    *,
    expected: Expected | None = None,
    check: Check | None = None,
    by_rows: bool = False,
) -> Checkpoint:
    """Read a checkpoint, after checking that it is complete. expected, check: of the model's weights, as for `load_tensors`.

    by_rows: for a process that needs only some rows: tensors are read when they are asked for (`SavedTensors`).
    """
    expected = expected or Expected()
    read = open_tensors if by_rows else read_tensors
    fault = (find or find_fault)(path)
    if fault is not None:
        raise CheckpointError(f"the checkpoint is damaged: {fault}", where=str(path), fix="use another checkpoint")
    of_optimizer = Expected(range(PER_WEIGHT * expected.number.stop), PER_WEIGHT * expected.size)
    return Checkpoint(
        step_of(path),
        read(path, MODEL, expected, check),
        read(path, OPTIMIZER, of_optimizer),
        load_state(path),
    )


def open_tensors(path: Path, kind: str, expected: Expected | None = None, check: Check | None = None) -> SavedTensors:
    """The weights (MODEL) of a complete checkpoint, or the tensors of its OPTIMIZER, each read when it is asked for."""
    found = SavedTensors(_files_of(path, kind), expected=expected)
    if check is not None:
        check(found.outline())
    return found


def read_tensors(path: Path, kind: str, expected: Expected | None = None, check: Check | None = None) -> dict[str, Tensor]:
    """All tensors that `open_tensors` opens."""
    files = _files_of(path, kind)
    if len(files) == 1:
        return load_tensors(files[0], expected=expected, check=check)
    return dict(open_tensors(path, kind, expected, check))


def where_of(path: Path, kind: str) -> Path:
    """The file of a complete checkpoint that holds these tensors, or its folder if several do."""
    files = _files_of(path, kind)
    return files[0] if len(files) == 1 else path


def _files_of(path: Path, kind: str) -> list[Path]:
    count = _count(read_json(path / MANIFEST, MOST_MANIFEST)["files"])
    return [path / _file_name(kind, index, count) for index in range(count)]


def load_state(path: Path) -> dict[str, Any]:
    """The small values of a checkpoint (state.json); their form is checked by `saved_state.fitted`."""
    state = read_json(path / "state.json", MOST_STATE)
    if not isinstance(state, dict):
        raise InputError("the file holds no table", where=str(path / "state.json"), fix="use a checkpoint of a run")
    return state


def newest_state(folder: Path) -> tuple[int, dict[str, Any]]:
    """The step and the state of the newest checkpoint, from its state.json alone; 0 and an empty state if there is none.

    Its files are hashed when it is loaded; if it is damaged, the one before it is used.
    """
    for path in reversed(steps(folder)):
        with suppress(InputError):
            return step_of(path), load_state(path)
    return 0, {}


def is_scheduled(path: Path) -> bool:
    """Whether a complete checkpoint is on the run's schedule, and not an extra one that a stopped run left."""
    return load_state(path).get("scheduled") is not False


def average(paths: list[Path], *, expected: Expected | None = None, check: Check | None = None) -> dict[str, Tensor]:
    """The mean of the weights of several checkpoints, oldest first; non-floating-point tensors are the newest ones."""
    newest = read_tensors(paths[-1], MODEL, expected, check)
    floating = {name: tensor for name, tensor in newest.items() if tensor.is_floating_point()}
    mean = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in floating.items()}
    for path in paths:
        tensors = newest if path == paths[-1] else read_tensors(path, MODEL, expected, check)
        check_alike(tensors, newest, where_of(path, MODEL))
        for name, total in mean.items():
            mean[name] = total + tensors[name].double() / len(paths)
    return {name: mean[name].to(tensor.dtype) if name in mean else tensor for name, tensor in newest.items()}
