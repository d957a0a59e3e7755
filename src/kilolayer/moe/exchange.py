"""Dispatch of tokens to experts that are held by other processes, by all-to-all communication."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.moe.dispatch import Dispatch
from kilolayer.moe.groups import Groups
from kilolayer.parallel.collectives import exchange, gather
from kilolayer.parallel.group import ExpertGroup


@dataclass(frozen=True)
class SharedDispatch:
    """As Dispatch, for experts that the processes of a group share. All processes must run the same layer at the same time.

    own: this process's choices, sorted by expert and so by the process that holds it. arrived: the choices of all processes
    of experts held here, sorted by expert. sent, received: the number of rows to and from each process.
    counts: [processes, k, experts], the number of j-th choices of each expert on each process.
    """

    own: Dispatch
    arrived: Dispatch
    sent: list[int]
    received: list[int]
    counts: Tensor
    chosen: Tensor
    group: ExpertGroup

    @classmethod
    def of(cls, chosen: Tensor, experts: int, group: ExpertGroup) -> SharedDispatch:
        """chosen: int64 [tokens, k], the expert of each choice; the number of experts means that it is not sent anywhere."""
        counts = gather(_count(chosen, experts), group)
        by_process = counts.sum(dim=1).unflatten(1, (group.size, -1))  # [from, to, experts of each]
        to_here = by_process[:, group.rank]
        # The only point where sizes are read back from the device: memory for the arriving rows must be allocated.
        sent, received = torch.stack([by_process[group.rank].sum(dim=1), to_here.sum(dim=1)]).tolist()
        held = torch.arange(to_here.shape[1], device=chosen.device).repeat(group.size)
        arriving = held.repeat_interleave(to_here.flatten(), output_size=sum(received))
        return cls(
            Dispatch.of(chosen, experts),
            Dispatch.of(arriving[:, None], to_here.shape[1]),
            sent,
            received,
            counts,
            chosen,
            group,
        )

    @property
    def groups(self) -> Groups:
        """The groups of the rows that `gather` returns: one for each expert held here."""
        return self.arrived.groups

    @property
    def load(self) -> Tensor:
        """The number of choices of each expert, over all processes: int64 [experts]."""
        return self.counts.sum(dim=(0, 1))

    def gather(self, tokens: Tensor) -> Tensor:
        """Send this process's tokens [tokens, dim]; return the rows of all processes for the experts held here, [rows, dim]."""
        rows = self.own.gather(tokens)[: sum(self.sent)]
        return self.arrived.gather(exchange(rows, self.sent, self.received, self.group))

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Send the experts' outputs back; return the weighted sum of each token's rows: [tokens, dim], in the rows' dtype."""
        returned = exchange(self.arrived.unsort(rows), self.received, self.sent, self.group)
        nowhere = len(self.own.order) - len(returned)
        return self.own.combine(F.pad(returned, (0, 0, 0, nowhere)), weights)

    def queue(self) -> Tensor:
        """The number of choices of the same expert that precede each choice, as if on one process: int64 [tokens, k].

        Tokens are ordered by rank; as within a process, all first choices precede all second ones.
        """
        everyones, own = self.counts.sum(dim=0), self.counts[self.group.rank]
        others = everyones - own
        earlier_choices = others.cumsum(dim=0) - others
        lower_ranks = self.counts[: self.group.rank].sum(dim=0)
        ahead = earlier_choices + lower_ranks
        return self.own.queue() + ahead.gather(1, self.chosen.mT.clamp(max=ahead.shape[1] - 1)).mT


def make_dispatch(chosen: Tensor, experts: int, group: ExpertGroup | None) -> Dispatch | SharedDispatch:
    """Build the dispatch of the choices; group: the processes that share the experts, None if this one holds them all."""
    return Dispatch.of(chosen, experts) if group is None else SharedDispatch.of(chosen, experts, group)


def _count(chosen: Tensor, experts: int) -> Tensor:
    """The number of j-th choices of each expert: int64 [k, experts]."""
    counts = chosen.new_zeros(chosen.shape[1], experts + 1)
    return counts.scatter_add_(1, chosen.mT, torch.ones_like(chosen.mT))[:, :-1]
