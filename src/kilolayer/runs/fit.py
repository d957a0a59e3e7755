"""Whether training fits in the memory of a device, and what would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache

from kilolayer.runs.budget import Budget
from kilolayer.runs.division import Division

RESERVED, SHARE = 2**30, 0.05
"""Bytes for the GPU's own context and kernels, and the share of a peak that is lost between blocks of memory."""
MOST_PROCESSES = 4096


@dataclass(frozen=True)
class Remedy:
    """A way to train in less memory. needed: bytes, including what is reserved.

    recompute: the backward pass recomputes each layer. batch: sequences per batch. accumulate: batches per step for each one
    of before. processes: how many share all matrices; None: as planned, and then the steps are the same.
    """

    recompute: bool
    batch: int
    accumulate: int
    needed: int
    processes: int | None = None


@dataclass(frozen=True)
class Fit:
    """memory: bytes of the device. needed: bytes of training as planned. least: bytes that no batch can do without.

    remedies: what fits, if the plan does not, the fastest first: with the fewest batches, and then without recomputing. Then
    with all matrices shared by more processes: the fewest with which it fits at all, if it did not, and with no other change.
    """

    memory: int
    needed: int
    least: int
    remedies: tuple[Remedy, ...]

    @property
    def fits(self) -> bool:
        return self.needed <= self.memory


def fit(
    cost: Budget,
    memory: int,
    cost_of: Callable[[int], Budget],
    *,
    recompute: bool = False,
    more: Iterable[Division] = (),
) -> Fit:
    """Compare a plan with the memory of a device, in bytes. cost_of: the plan with another number of sequences per batch.

    recompute: each layer is recomputed already. more: how more and more processes could divide the model.
    """
    training = cost.training
    needed, least = reserve(training.peak_recomputed if recompute else training.peak), reserve(training.least)
    ways = [True] if recompute else [False, True] if training.activations_recomputed < training.activations else [False]
    if needed <= memory:
        return Fit(memory, needed, least, ())
    cost_of = cache(cost_of)
    found = _remedies(cost, memory, cost_of, ways)
    for division in more:
        shared = replace(cost, division=division)
        own = _remedies(shared, memory, lambda batch, d=division: replace(cost_of(batch), division=d), ways)
        unchanged = [each for each in own if each.accumulate == 1 and each.recompute == recompute]
        if unchanged or (own and not found):
            found.append(replace(own[0], processes=division.processes))
        if unchanged:
            break
    return Fit(memory, needed, least, tuple(found))


def more_processes(division: Division, experts: int | None) -> list[Division]:
    """Divisions of all matrices among more processes than now; experts: their number, which must be a multiple of that."""
    first = 2 if division.processes == 1 else division.processes * (1 if division.shard == "none" else 2)
    sizes = [first << times for times in range(MOST_PROCESSES.bit_length()) if first << times <= MOST_PROCESSES]
    return [Division(size, "full", division.unit) for size in sizes if not (experts or 0) % size]


def reserve(peak: int) -> int:
    """Bytes that a device must have for a peak of planned bytes."""
    return RESERVED + int(peak * (1 + SHARE))


def _remedies(cost: Budget, memory: int, cost_of: Callable[[int], Budget], ways: list[bool]) -> list[Remedy]:
    """The largest batch that fits for each of these ways, with and without recomputing; the fastest first."""
    if reserve(cost.training.least) > memory:
        return []
    found = [_largest(cost, memory, cost_of, way) for way in ways]
    return sorted((each for each in found if each is not None), key=lambda each: (each.accumulate, each.recompute))


def _largest(cost: Budget, memory: int, cost_of: Callable[[int], Budget], recompute: bool) -> Remedy | None:
    """The largest batch that fits, after halving as often as needed; None if none does."""
    parts = 1
    while True:
        batch = -(-cost.work.batch // parts)
        training = (cost if parts == 1 else cost_of(batch)).training
        needed = reserve(training.peak_recomputed if recompute else training.peak)
        if needed <= memory:
            return Remedy(recompute, batch, -(-cost.work.batch // batch), needed)
        if batch == 1:
            return None
        parts *= 2
