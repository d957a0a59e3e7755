"""Processes that exchange tensors: those of a run, or those among which its experts or its matrices are divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist

from kilolayer.errors import InputError, OptionError
from kilolayer.terminal import counted


@dataclass(frozen=True)
class Peers:
    """Processes that call collective operations together, as this one of them sees them.

    processes: torch's group of them. rank: the number of this one among them, from 0. size: how many they are.
    """

    processes: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, processes: dist.ProcessGroup | None) -> Peers:
        """From a process group that this process belongs to; None is the group of all processes."""
        if not dist.is_available() or not dist.is_initialized():
            raise InputError(
                "there is no process group",
                fix="call torch.distributed.init_process_group() first, in a script that torchrun starts",
            )
        chosen = processes or dist.group.WORLD
        assert chosen is not None
        rank = dist.get_rank(chosen)
        if rank < 0:
            raise InputError("this process is not in the group", fix="call it only on the processes of the group")
        return cls(chosen, rank, dist.get_world_size(chosen))

    @property
    def device(self) -> torch.device:
        """The device on which these processes can exchange tensors."""
        return torch.device("cuda" if dist.get_backend(self.processes) == "nccl" else "cpu")

    def part(self, experts: int) -> range:
        """The indices of the experts that this process holds: consecutive, and equally many on each."""
        if experts % self.size:
            divisors = [str(count) for count in range(1, experts + 1) if experts % count == 0]
            raise OptionError(
                f"{counted(experts, 'expert')} cannot be shared evenly by {counted(self.size, 'process')}",
                fix=f"start one of these numbers of processes: {', '.join(divisors)}",
            )
        count = experts // self.size
        return range(self.rank * count, (self.rank + 1) * count)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # copies of a model share the process group
