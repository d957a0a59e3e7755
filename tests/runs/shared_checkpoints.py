"""What each of several processes does in the tests of checkpoints that they write together."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kilolayer.errors import InputError
from kilolayer.parallel import heartbeat
from kilolayer.parallel.processes import Processes
from kilolayer.runs import checkpoint, hashed_file
from kilolayer.runs.checkpoint import Checkpoint, CheckpointError, Part
from kilolayer.runs.saver import Saver

ROWS = {"weight": 7, "bias": 3}
"""The tensors that are divided, and how many rows they have: of four processes one gets none of `bias`."""
write = checkpoint.write_hashed


def whole(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    model = {
        "weight": torch.randn(7, 5, generator=generator),
        "bias": torch.randn(3, generator=generator).bfloat16(),
        "norm": torch.randn(5, generator=generator),
        "scale": torch.randn((), generator=generator),
    }
    moments = {f"{name}/mean": torch.randn(tensor.shape, generator=generator) for name, tensor in model.items()}
    others = {"updates": torch.tensor(float(step)), "random.cpu": generator.get_state()}
    return Checkpoint(step, model, moments | others, {"guard": {"scale": 1.0}, "scheduled": True})


def part_of(step: int, rank: int, size: int) -> Checkpoint:
    """What a process holds of `whole(step)`."""
    rows = {
        name: range(min(rank * -(-count // size), count), min((rank + 1) * -(-count // size), count))
        for name, count in ROWS.items()
    }

    def own(tensors: Any) -> dict[str, Tensor]:
        held = {}
        for name, tensor in tensors.items():
            mine = rows.get(name.partition("/")[0])
            if mine is None and rank == 0:
                held[name] = tensor
            elif mine:
                held[name] = tensor[mine.start : mine.stop]
        return held

    all_ = whole(step)
    part = Part(rank, size, {name: (mine.start, ROWS[name]) for name, mine in rows.items()})
    return Checkpoint(step, own(all_.model), own(all_.optimizer), all_.state, part)


def save(group: dist.ProcessGroup, folder: Path, steps: Iterable[int], keep: int) -> None:
    """Save these steps, one after the other."""
    with Saver(folder, keep, processes=Processes(group)) as saver:
        for step in steps:
            saver.save(part_of(step, dist.get_rank(group), dist.get_world_size(group)), best=None)


def fill_the_disk(group: dist.ProcessGroup, folder: Path, step: int, name: str) -> None:
    """Save; the disk is full in the middle of the file `name`. Every process gets the error, from a check beside training."""

    def full(path: Path, parts: Iterable[bytes | memoryview]) -> dict[str, Any]:
        if path.name != name:
            return write(path, parts)
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    def train() -> None:
        with Saver(folder, 9, processes=processes) as saver:
            saver.save(part_of(step, dist.get_rank(group), dist.get_world_size(group)), best=None)
            for _ in range(1000):
                processes.largest(0)  # a step
                saver.check()
                time.sleep(0.01)

    processes = Processes(group)
    with patch.object(checkpoint, "write_hashed", full), pytest.raises(CheckpointError) as caught:
        train()
    assert caught.value.what == f"the checkpoint of step {step} could not be written: No space left on device"
    assert caught.value.where == str(checkpoint.path_of(folder, step))
    assert "it needs " in caught.value.fix
    dist.barrier(group)
    assert not list(folder.glob(".step-*"))


def die(group: dist.ProcessGroup, folder: Path, step: int, rank: int, when: str) -> None:
    """Save; one process is killed at this moment."""

    def reached(here: str) -> None:
        if dist.get_rank(group) == rank and here == when:
            os.kill(os.getpid(), signal.SIGKILL)

    def dying(path: Path, parts: Iterable[bytes | memoryview]) -> dict[str, Any]:
        kind = path.name.partition("-")[0].partition(".")[0]
        path.write_bytes(b"half")
        reached(f"in {kind}")
        path.unlink()
        written = write(path, parts)
        reached(f"after {kind}")
        return written

    rename = Path.rename

    def renamed(path: Path, target: Path) -> Path:
        reached("before the rename")
        moved = rename(path, target)
        reached("after the rename")
        return moved

    with patch.object(checkpoint, "write_hashed", dying), patch.object(Path, "rename", renamed):
        save(group, folder, [step], keep=9)


def die_at_random(group: dist.ProcessGroup, folder: Path, steps: range, rank: int, seconds: float) -> None:
    """Save; after so many seconds, one process is killed."""
    if dist.get_rank(group) == rank:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, seconds)
    save(group, folder, steps, keep=3)
    time.sleep(seconds)


def fail_in_code(group: dist.ProcessGroup, folder: Path) -> None:
    """Save; on one process something fails that is not a fault of the disk."""

    def fail(*_: object) -> Any:
        raise KeyError("absent")

    failing = patch.object(Part, "metadata", fail) if dist.get_rank(group) == 1 else nullcontext()
    with failing, pytest.raises(RuntimeError, match=r"process 1 has failed: KeyError\('absent'\)"):
        save(group, folder, [1], 9)


def fail_after_writing(group: dist.ProcessGroup, folder: Path) -> None:
    """Save; the first process cannot delete what is old. All get its error, and none waits for it."""
    unreadable = InputError("the folder cannot be read", where=str(folder))
    with patch("kilolayer.runs.saver.prune", side_effect=unreadable), pytest.raises(InputError) as caught:
        save(group, folder, [1], 9)
    assert (caught.value.what, caught.value.where) == (unreadable.what, unreadable.where)


def write_slowly(group: dist.ProcessGroup, folder: Path, bytes_at_once: int, hangs: bool) -> None:
    """Save under a watchdog of 1.5 seconds, on the disk of one process 100 bytes in a second, synced `bytes_at_once`."""
    rank, unsynced, write, ended = dist.get_rank(group), [0], os.pwrite, list[dict[int, int]]()

    def written(descriptor: int, data: memoryview, offset: int) -> int:
        unsynced[0] += len(data)
        return write(descriptor, data, offset)

    def sync(_: int) -> None:
        seconds, unsynced[0] = unsynced[0] / 100, 0
        time.sleep(seconds)

    store = dist.FileStore(str(folder.parent / "store"), dist.get_world_size(group))
    slow = patch.multiple(os, pwrite=written, fsync=sync, fdatasync=sync) if rank == 1 else nullcontext()
    pieces = patch.multiple(hashed_file, PIECE=bytes_at_once, THREADS=1)
    often = patch.multiple(heartbeat, POLL_SECONDS=0.1)
    seen = patch.object(heartbeat._Watch, "_end", lambda _, behind: ended.append(behind))
    with slow, pieces, often, seen, heartbeat.watchdog(store, rank, dist.get_world_size(group), 1.5, lambda: 7):
        checkpoint.save(folder, part_of(1, rank, dist.get_world_size(group)), Processes(group).for_thread())
    assert bool(ended) == hangs
    assert all(behind == {1: 7} for behind in ended)


def read_a_share(group: dist.ProcessGroup, folder: Path, damaged: str) -> None:
    """Each process checks some of the files, and all know what one has found."""
    rank, read = dist.get_rank(group), list[str]()
    fingerprint = checkpoint.fingerprint
    with patch.object(checkpoint, "fingerprint", lambda path: (read.append(path.name), fingerprint(path))[1]):
        fault = checkpoint.find_fault(folder, group=Processes(group).for_thread())
    assert fault is not None
    assert damaged in fault
    names = sorted(path.name for path in folder.iterdir() if path.name != "manifest.json")
    assert read == names[rank :: dist.get_world_size(group)]


def same(a: Checkpoint, b: Checkpoint) -> bool:
    """Whether two checkpoints hold the same, to the bit."""
    pairs = [(a.model, b.model), (a.optimizer, b.optimizer)]
    return (a.step, a.state) == (b.step, b.state) and all(
        x.keys() == y.keys() and all(torch.equal(x[name], y[name]) and x[name].dtype == y[name].dtype for name in x)
        for x, y in pairs
    )
