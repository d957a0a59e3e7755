"""Collective operations. Every function must be called by all processes of the group, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kilolayer.errors import KilolayerError
from kilolayer.parallel.heartbeat import begin_collective
from kilolayer.parallel.peers import Peers

AT_ONCE = 2**24  # gradient elements per all-reduce
Result = TypeVar("Result")


def on_all(act: Callable[[], Result], group: Peers | None) -> list[Result]:
    """Call `act` on each process and return the results of all, by rank; an error on one of them is raised on all.

    group: of gloo; None: this process alone.
    """
    if group is None:
        return [act()]
    own: Result | Exception
    try:
        own = act()
    except (OSError, KilolayerError) as error:
        own = error
    except Exception as error:
        own = RuntimeError(f"process {group.rank} has failed: {error!r}")
    everyones: list[Any] = [None] * group.size
    begin_collective()
    dist.all_gather_object(everyones, own, group=group.processes)
    for each in everyones:
        if isinstance(each, Exception):
            raise each
    return everyones


def sum_over(own: Tensor, group: Peers | None) -> Tensor:
    """The sum over processes, without gradient; without a group, the process's own tensor."""
    if group is None:
        return own
    summed = own.detach().clone()
    begin_collective()
    dist.all_reduce(summed, group=group.processes)
    return summed


def gather(own: Tensor, group: Peers) -> Tensor:
    """The tensors of all processes by rank, without gradient: [...] to [processes, ...]."""
    everyones = own.new_empty(group.size, *own.shape)
    begin_collective()
    dist.all_gather(list(everyones.unbind()), own.detach().contiguous(), group=group.processes)
    return everyones


def gather_first(own: Tensor, group: Peers) -> Tensor | None:
    """`gather` to the first process only; None on the others."""
    everyones = own.new_empty(group.size, *own.shape) if group.rank == 0 else None
    parts = None if everyones is None else list(everyones.unbind())
    begin_collective()
    dist.gather(own.detach().contiguous(), parts, group=group.processes, group_dst=0)
    return everyones


def from_first(own: Tensor, group: Peers) -> Tensor:
    """The first process's tensor on all processes, without gradient."""
    shared = own.detach().contiguous()
    begin_collective()
    dist.broadcast(shared, group=group.processes, group_src=0)
    return shared


def exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Peers) -> Tensor:
    """All-to-all: the first sent[0] rows go to the first process, the next sent[1] to the second, and so on. Differentiable.

    [sum of sent, width] to [sum of received, width]: received[r] rows from process r, in the order of ranks.
    """
    return _Exchange.apply(rows, list(sent), list(received), group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(rows: Tensor, sent: list[int], received: list[int], group: Peers) -> Tensor:
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        begin_collective()
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group.processes)
        return arrived

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.sent, ctx.received, ctx.group = inputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = grad_outputs
        return exchange(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter], group: Peers) -> None:
    """Replace each gradient by its sum over the processes.

    A trained parameter without a gradient counts as 0, because processes that skipped different parameters would deadlock.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            kinds.setdefault((parameter.grad.device, parameter.grad.dtype), []).append(parameter.grad)
    for gradients in kinds.values():
        for few in _buckets(gradients):
            _sum_joined(few, group)


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    few, size = [], 0
    for gradient in gradients:
        if few and size + gradient.numel() > AT_ONCE:
            yield few
            few, size = [], 0
        few.append(gradient)
        size += gradient.numel()
    yield few


def _sum_joined(gradients: list[Tensor], group: Peers) -> None:
    joined = torch.cat([gradient.flatten() for gradient in gradients])
    begin_collective()
    dist.all_reduce(joined, group=group.processes)
    for gradient, summed in zip(gradients, joined.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))
