"""The processes that train one model together, started by torchrun; without it, only this process."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from kilolayer.errors import OptionError
from kilolayer.parallel.heartbeat import begin_collective, watchdog
from kilolayer.parallel.launch import name_of_start
from kilolayer.parallel.peers import Peers
from kilolayer.terminal import counted

PATIENCE = timedelta(hours=12)
"""Timeout of collectives: the first process may train a vocabulary while the others wait. torchrun detects dead processes."""


class Processes:
    """The processes of a run. With one process, nothing is communicated.

    rank: the number of this process, from 0.
    size: the number of processes.
    numbers: the gloo group that exchanges numbers.
    group: the same processes, for tensors on the device. Both are None with one process. All methods that communicate must be
    called by all processes, in the same order.
    store: where each publishes its progress; None if there is no monitoring.
    step: the current step of this process.
    """

    def __init__(self, numbers: dist.ProcessGroup | None = None, store: dist.Store | None = None) -> None:
        self.numbers, self.store = numbers, store
        self.step = 0
        self.group = None if numbers is None else Peers.of(numbers)
        self.rank, self.size = (0, 1) if self.group is None else (self.group.rank, self.group.size)

    @classmethod
    @contextmanager
    def of_environment(cls) -> Iterator[Processes]:
        """The processes that torchrun has started, or this one alone."""
        if not dist.is_torchelastic_launched() or os.environ.get("WORLD_SIZE") == "1":
            yield cls()
            return
        store, rank, size = next(dist.rendezvous("env://", timeout=PATIENCE))
        own = dist.PrefixStore(name_of_start(store, rank, size), store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=PATIENCE)
        yield cls(dist.group.WORLD, own)
        # Not after a failure, when the others may never arrive.
        dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and the log for all."""
        return self.rank == 0

    def watchdog(self, timeout: float) -> AbstractContextManager[None]:
        """A context that all processes enter, in which one that hangs for `timeout` seconds is reported and all are ended."""
        if self.store is None:
            return nullcontext()
        return watchdog(self.store, self.rank, self.size, timeout, lambda: self.step)

    def check(self, device: torch.device) -> None:
        """Raise if there are not enough devices of this kind: each process needs its own."""
        if self.size == 1 or device.type != "cuda":
            return
        here, devices = int(os.environ.get("LOCAL_WORLD_SIZE", self.size)), torch.cuda.device_count()
        if here > devices:
            raise OptionError(
                f"{counted(here, 'process')} cannot share {counted(devices, 'GPU')}",
                where="train.device",
                fix=f'start {devices}: torchrun --nproc-per-node {devices}; or set it to "cpu"',
            )

    def own_device(self, device: torch.device) -> torch.device:
        """The device of this process, of the same type as `device`; called once, before tensors on it are summed."""
        if self.size == 1 or device.type != "cuda":
            return device
        own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(own)
        everyone = dist.new_group(backend="nccl", timeout=PATIENCE)
        assert isinstance(everyone, dist.ProcessGroup)
        self.group = Peers.of(everyone)
        return own

    def for_thread(self) -> Peers | None:
        """A gloo group for one more thread of each process, so that its exchanges and training's do not meet."""
        if self.numbers is None:
            return None
        own = dist.new_group(backend="gloo", timeout=PATIENCE)
        assert isinstance(own, dist.ProcessGroup)
        return Peers.of(own)

    @contextmanager
    def first_process_first(self) -> Iterator[None]:
        """Run the body on the first process, then on the first of each other machine, then on the others.

        A machine may have a cache of its own. If the body fails in the first or second turn, all other processes exit silently.
        """
        turn = 0 if self.first else 1 if os.environ.get("LOCAL_RANK") == "0" else 2
        for _ in range(turn):
            self._wait()
        try:
            yield
        except BaseException:
            if turn < 2:
                self.total(1)
            raise
        for _ in range(2 - turn):
            self._wait()

    def _wait(self) -> None:
        """Wait for the processes whose turn it is; exit if one of them has failed."""
        if self.total(0):
            raise SystemExit(2)

    def total(self, number: int) -> int:
        """The sum of `number` over all processes."""
        return self._reduce(number, dist.ReduceOp.SUM)

    def largest(self, number: int) -> int:
        """The maximum of `number` over all processes."""
        return self._reduce(number, dist.ReduceOp.MAX)

    def broadcast_number(self, number: float) -> float:
        """The first process's `number`, on all processes."""
        if self.numbers is None:
            return number
        shared = torch.tensor(number, dtype=torch.float64)
        begin_collective()
        dist.broadcast(shared, group=self.numbers, group_src=0)
        return float(shared)

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over the processes, bitwise identical on all."""
        if self.group is not None:
            for tensor in tensors:
                begin_collective()
                dist.all_reduce(tensor, group=self.group.processes)

    def max_(self, tensor: Tensor) -> None:
        """Replace the tensor by its maximum over the processes."""
        if self.group is not None:
            begin_collective()
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group.processes)

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by the first process's."""
        if self.group is not None:
            for tensor in tensors:
                begin_collective()
                dist.broadcast(tensor, group=self.group.processes, group_src=0)

    def seed_noise(self, seed: int, step: int) -> None:
        """Seed torch by step and process, so that dropout differs between processes but a repeated step is the same; alone,
        do nothing."""
        if self.size > 1:
            digest = hashlib.sha256(f"{seed} {step} {self.rank}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "little"))

    def _reduce(self, number: int, how: dist.ReduceOp.RedOpType) -> int:
        if self.numbers is None:
            return number
        shared = torch.tensor(number)
        begin_collective()
        dist.all_reduce(shared, how, group=self.numbers)
        return int(shared)
