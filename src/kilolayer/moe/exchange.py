"""Tokens to experts on other processes, and back."""

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
    """As Dispatch, for experts that the processes of a group share; every process is at the same layer at the same time.

    own: this process's choices sorted by expert, and so by the process that holds it; arrived: the choices of all processes
    that fell on the experts held here, sorted by expert. sent and received: rows to and from each process.
    counts [processes, k, experts]: the j-th choices of each process that fell on each expert.
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
        """chosen: int64 [tokens, k]; `experts`, the number of them, where a token is sent nowhere."""
        counts = gather(_count(chosen, experts), group)
        by_process = counts.sum(dim=1).unflatten(1, (group.size, -1))  # [from, to, experts of each]
        to_here = by_process[:, group.rank]
        # The one place where sizes are read back: memory for the rows that arrive has to be found.
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
        """Of the rows that `gather` returns: one for each expert held here."""
        return self.arrived.groups

    @property
    def load(self) -> Tensor:
        """The choices of all processes that fell on each expert: int64 [experts]."""
        return self.counts.sum(dim=(0, 1))

    def gather(self, tokens: Tensor) -> Tensor:
        """This process's [tokens, dim] to the rows of the experts held here, from all processes."""
        rows = self.own.gather(tokens)[: sum(self.sent)]
        return self.arrived.gather(exchange(rows, self.sent, self.received, self.group))

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each token's rows, back where the tokens are: [tokens, dim], in the rows' dtype."""
        returned = exchange(self.arrived.unsort(rows), self.received, self.sent, self.group)
        nowhere = len(self.own.order) - len(returned)
        return self.own.combine(F.pad(returned, (0, 0, 0, nowhere)), weights)

    def queue(self) -> Tensor:
        """How many choices of the same expert come before each, as if all tokens were on one process: int64 [tokens, k].

        Tokens are in the order of ranks; as within a process, all first choices come before all second ones.
        """
        everyones, own = self.counts.sum(dim=0), self.counts[self.group.rank]
        others = everyones - own
        earlier_choices = others.cumsum(dim=0) - others
        lower_ranks = self.counts[: self.group.rank].sum(dim=0)
        ahead = earlier_choices + lower_ranks
        return self.own.queue() + ahead.gather(1, self.chosen.mT.clamp(max=ahead.shape[1] - 1)).mT


def make_dispatch(chosen: Tensor, experts: int, group: ExpertGroup | None) -> Dispatch | SharedDispatch:
    """The way of each choice to its expert; group: the processes that share the experts, None where all are here."""
    return Dispatch.of(chosen, experts) if group is None else SharedDispatch.of(chosen, experts, group)


def _count(chosen: Tensor, experts: int) -> Tensor:
    """The j-th choices that fell on each expert: int64 [k, experts]."""
    counts = chosen.new_zeros(chosen.shape[1], experts + 1)
    return counts.scatter_add_(1, chosen.mT, torch.ones_like(chosen.mT))[:, :-1]
