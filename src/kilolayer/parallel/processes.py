"""The processes that train one model together, as torchrun starts them; without it, this one alone."""

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
from kilolayer.parallel.group import ExpertGroup
from kilolayer.parallel.heartbeat import begin_collective, watched
from kilolayer.terminal import counted

PATIENCE = timedelta(hours=12)
"""The first process may train a vocabulary while the others wait; the dead are torchrun's to find."""


class Processes:
    """rank: the number of this process, from 0; size: how many there are. Alone, nothing is sent and nothing changes.

    numbers: the group that exchanges numbers, over gloo; group: the same processes, for tensors of the device; None where there
    is one. All methods that communicate are called by all processes, in the same order. store: where each tells the others
    that it goes on; None where nobody watches. step: where in its work this process is.
    """

    def __init__(self, numbers: dist.ProcessGroup | None = None, store: dist.Store | None = None) -> None:
        self.numbers, self.store = numbers, store
        self.step = 0
        self.group = None if numbers is None else ExpertGroup.of(numbers)
        self.rank, self.size = (0, 1) if self.group is None else (self.group.rank, self.group.size)

    @classmethod
    @contextmanager
    def of_environment(cls) -> Iterator[Processes]:
        """Those that torchrun has started."""
        if not dist.is_torchelastic_launched() or os.environ.get("WORLD_SIZE") == "1":
            yield cls()
            return
        store, rank, size = next(dist.rendezvous("env://", timeout=PATIENCE))
        # Processes that torchrun starts again find the addresses of the dead in its store.
        own = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=PATIENCE)
        yield cls(dist.group.WORLD, own)
        # Not after a failure: the others may never come.
        dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and the log for all."""
        return self.rank == 0

    def watched(self, timeout: float) -> AbstractContextManager[None]:
        """Inside, which all processes enter, one that stands still for `timeout` seconds is named and ends them all."""
        if self.store is None:
            return nullcontext()
        return watched(self.store, self.rank, self.size, timeout, lambda: self.step)

    def check(self, device: torch.device) -> None:
        """Raise where there are not enough devices of this kind: each process has its own."""
        if self.size == 1 or device.type != "cuda":
            return
        here, devices = int(os.environ.get("LOCAL_WORLD_SIZE", self.size)), torch.cuda.device_count()
        if here > devices:
            raise OptionError(
                f"{counted(here, 'process')} cannot share {counted(devices, 'GPU')}",
                where="train.device",
                fix=f'start {devices}: torchrun --nproc-per-node {devices}; or set it to "cpu"',
            )

    def place(self, device: torch.device) -> torch.device:
        """The device of this process, of the kind of `device`; called once, before tensors there are summed."""
        if self.size == 1 or device.type != "cuda":
            return device
        own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(own)
        everyone = dist.new_group(backend="nccl", timeout=PATIENCE)
        assert isinstance(everyone, dist.ProcessGroup)
        self.group = ExpertGroup.of(everyone)
        return own

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """The first process does what is inside before the others; where it fails, they end without a word."""
        if self.first:
            try:
                yield
            except BaseException:
                self.of_first(0)
                raise
            self.of_first(1)
        else:
            if not self.of_first(0):
                raise SystemExit(2)
            yield

    def total(self, number: int) -> int:
        """The sum of the numbers of all processes."""
        return self._reduce(number, dist.ReduceOp.SUM)

    def largest(self, number: int) -> int:
        """The largest of the numbers of all processes."""
        return self._reduce(number, dist.ReduceOp.MAX)

    def of_first(self, number: float) -> float:
        """The number of the first process."""
        if self.numbers is None:
            return number
        shared = torch.tensor(number, dtype=torch.float64)
        begin_collective()
        dist.broadcast(shared, group=self.numbers, group_src=0)
        return float(shared)

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over the processes: bit by bit the same on all."""
        if self.group is not None:
            for tensor in tensors:
                begin_collective()
                dist.all_reduce(tensor, group=self.group.processes)

    def spread_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by the first process's."""
        if self.group is not None:
            for tensor in tensors:
                begin_collective()
                dist.broadcast(tensor, group=self.group.processes, group_src=0)

    def seed_noise(self, seed: int, step: int) -> None:
        """Let torch draw other numbers on each process, and the same ones when a step is taken again; alone, go on as it is."""
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
