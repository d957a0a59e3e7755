"""Endless batches with a position that can be saved."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from kilolayer.errors import InputError

AnyBatch = TypeVar("AnyBatch")


class EndlessBatches(ABC, Iterator[AnyBatch], Generic[AnyBatch]):
    """An endless iterator over batches. The order of an epoch depends only on (seed, epoch), so a position is three numbers.

    identity: what the batches depend on besides the epoch; a position is restored only if it is the same.
    """

    def __init__(self, seed: int, *identity: Any) -> None:
        self.seed, self.epoch, self.index = seed, 0, 0
        self.identity = hashlib.sha256(repr((seed, *identity)).encode()).hexdigest()[:16]

    def __next__(self) -> AnyBatch:
        self.skip()
        return self.read(self.index - 1)

    @abstractmethod
    def __len__(self) -> int:
        """Number of batches in the current epoch."""

    @abstractmethod
    def read(self, index: int) -> AnyBatch:
        """The batch with this index in the current epoch."""

    def skip(self) -> None:
        """Advance by one batch without reading it."""
        if self.index >= len(self):
            self.epoch, self.index = self.epoch + 1, 0
        self.index += 1

    def state(self) -> dict[str, int | str]:
        """The position as JSON-compatible values; after `load_state`, iteration continues with the next batch."""
        return {"epoch": self.epoch, "index": self.index, "seed": self.seed, "data": self.identity}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a saved position. It must come from the same data, shapes and seed."""
        self.epoch, self.index = check_position(state, self.identity, self.seed)


def check_position(state: Mapping[str, Any], identity: str, seed: int) -> tuple[int, int]:
    """The epoch and index of a saved position, which must belong to the batches identified by `identity` and `seed`."""
    epoch, index = state.get("epoch"), state.get("index")
    if state.get("data") != identity or state.get("seed") != seed:
        raise InputError(
            "the saved position belongs to different data, another seed or different batches",
            where="the saved state of the data",
            fix="resume with the configuration and the text of the run, or start a new run",
        )
    if type(epoch) is not int or type(index) is not int or epoch < 0 or index < 0:
        raise InputError(f"not a position: {dict(state)}", where="the saved state of the data", fix="use what state() returned")
    return epoch, index
