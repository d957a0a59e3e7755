"""Experts that are held by other processes: rows are sent to them and back, by all-to-all communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.moe.dispatch import Dispatch
from kilolayer.moe.groups import Groups
from kilolayer.parallel.collectives import exchange
from kilolayer.parallel.peers import Peers


class Exchange(NamedTuple):
    """How rows get to the processes that hold their experts, and back. All processes must run the same layer at the same time.

    sent, received: the number of rows to and from each process. held: int64 [rows], for each row that arrives, its expert among
    those held here; rows arrive in the order of the processes, and within each sorted by expert.
    """

    sent: list[int]
    received: list[int]
    held: Tensor
    group: Peers

    @classmethod
    def of(cls, counts: Tensor, group: Peers) -> Self:
        """counts: `count_choices` of each process, int64 [processes, k, experts]."""
        by_process = counts.sum(dim=1).unflatten(1, (group.size, -1))  # [from, to, experts of each]
        to_here = by_process[:, group.rank]
        # The only point where sizes are read back from the device: memory for the arriving rows must be allocated.
        sent, received = torch.stack([by_process[group.rank].sum(dim=1), to_here.sum(dim=1)]).tolist()
        held = torch.arange(to_here.shape[1], device=counts.device).repeat(group.size)
        return cls(sent, received, held.repeat_interleave(to_here.flatten(), output_size=sum(received)), group)

    def run(self, rows: Tensor, run_arrived: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """What the experts make of rows sorted by expert, [rows, dim] to the same shape.

        run_arrived: computes the rows that arrive here, given with their experts. Rows that are not sent anywhere become 0.
        """
        arrived = exchange(rows[: sum(self.sent)], self.sent, self.received, self.group)
        returned = exchange(run_arrived(arrived, self.held), self.received, self.sent, self.group)
        return F.pad(returned, (0, 0, 0, len(rows) - len(returned)))


class JointDispatch(NamedTuple):
    """The choices of several processes as those of one batch: what `Dispatch` says of one process's.

    own: this process's choices `chosen` [tokens, k], sorted by expert. counts: `count_choices` of each process, by rank.
    """

    own: Dispatch
    chosen: Tensor
    counts: Tensor
    rank: int

    @property
    def load(self) -> Tensor:
        """The number of choices of each expert, over all processes: int64 [experts]."""
        return self.counts.sum(dim=(0, 1))

    @property
    def tokens(self) -> Tensor:
        """The number of tokens without padding, each of which has one first choice: int64 []."""
        return self.counts[:, 0].sum()

    def queue(self) -> Tensor:
        """The number of choices of the same expert that precede each choice, as if on one process: int64 [tokens, k].

        Tokens are ordered by rank; as within a process, all first choices precede all second ones.
        """
        everyones, own = self.counts.sum(dim=0), self.counts[self.rank]
        others = everyones - own
        earlier_choices = others.cumsum(dim=0) - others
        lower_ranks = self.counts[: self.rank].sum(dim=0)
        ahead = earlier_choices + lower_ranks
        return self.own.queue() + ahead.gather(1, self.chosen.mT.clamp(max=ahead.shape[1] - 1)).mT


def count_choices(chosen: Tensor, experts: int) -> Tensor:
    """The number of j-th choices of each expert: int64 [tokens, k] to [k, experts]."""
    counts = chosen.new_zeros(chosen.shape[1], experts + 1)
    return counts.scatter_add_(1, chosen.mT, torch.ones_like(chosen.mT))[:, :-1]


def run_in_order(arrived: Tensor, held: Tensor, experts: int, run: Callable[[Tensor, Groups], Tensor]) -> Tensor:
    """What `run` makes of rows sorted by their experts `held`, in the order in which they have arrived."""
    dispatch = Dispatch.of(held[:, None], experts)
    return dispatch.unsort(run(dispatch.gather(arrived), dispatch.groups))
