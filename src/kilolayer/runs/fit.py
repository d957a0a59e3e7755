"""Whether training fits in the memory of a device, and what would make it fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kilolayer.runs.budget import Budget

RESERVED, SHARE = 2**30, 0.05
"""Bytes for the GPU's own context and kernels, and the share of a peak that is lost between blocks of memory."""


@dataclass(frozen=True)
class Remedy:
    """A way to train in less memory, with the same steps. needed: bytes, including what is reserved.

    recompute: the backward pass recomputes each layer. batch: sequences per batch. accumulate: batches per step for each one
    of before.
    """

    recompute: bool
    batch: int
    accumulate: int
    needed: int


@dataclass(frozen=True)
class Fit:
    """memory: bytes of the device. needed: bytes of training as planned. least: bytes that no batch can do without.

    remedies: what fits, if the plan does not, the fastest first: with the fewest batches, and then without recomputing.
    """

    memory: int
    needed: int
    least: int
    remedies: tuple[Remedy, ...]

    @property
    def fits(self) -> bool:
        return self.needed <= self.memory


def fit(cost: Budget, memory: int, cost_of: Callable[[int], Budget], *, recompute: bool = False) -> Fit:
    """Compare a plan with the memory of a device, in bytes. cost_of: the plan with another number of sequences per batch.

    recompute: each layer is recomputed already.
    """
    training = cost.training
    needed = reserve(training.peak_recomputed if recompute else training.peak)
    least = reserve(training.weights + training.optimizer + training.gradients)
    ways = [True] if recompute else [False, True] if training.activations_recomputed < training.activations else [False]
    remedies = [] if needed <= memory or least > memory else [_largest(cost, memory, cost_of, way) for way in ways]
    found = sorted((each for each in remedies if each is not None), key=lambda each: (each.accumulate, each.recompute))
    return Fit(memory, needed, least, tuple(found))


def reserve(peak: int) -> int:
    """Bytes that a device must have for a peak of planned bytes."""
    return RESERVED + int(peak * (1 + SHARE))


def _largest(cost: Budget, memory: int, cost_of: Callable[[int], Budget], recompute: bool) -> Remedy | None:
    """The largest batch that fits, after halving as often as needed; None if none does."""
    parts = 1
    while True:
        batch = -(-cost.work.batch // parts)
        training = (cost if parts == 1 else cost_of(batch)).training
        needed = reserve(training.peak_recomputed if recompute else training.peak)
        if needed <= memory:
            return Remedy(recompute, batch, parts, needed)
        if batch == 1:
            return None
        parts *= 2
