"""Decides when work is recorded (after a warm-up, once per shape), and handles failed recordings and lack of memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from kilolayer.layers.modules import tensors_of
from kilolayer.runtime.recorder import AroundCapture, Recorder, Restart, WorkItem
from kilolayer.speed.graph import GraphPool, Recording


class GraphRecorder(Recorder):
    """Records work. The first run of each shape key is a warm-up, the second is recorded, and all later ones replay it.

    subject: the beginning of the message about a fallback, such as "steps run".
    pool: the memory of the recordings; None if nothing is recorded.
    """

    def __init__(self, device: torch.device, subject: str, say: Callable[[str], None], pool: GraphPool | None) -> None:
        super().__init__(device)
        self.subject, self.say, self.pool = subject, say, pool
        self.warm: set[Hashable] = set()
        self.recordings: dict[Hashable, Recording] = {}
        self._followed: tuple[weakref.ref[nn.Module], Hashable] | None = None
        if pool is not None:
            pool.recordings.append(self.recordings)

    @property
    def records(self) -> bool:
        return self.pool is not None

    def sharing_pool(self, subject: str) -> GraphRecorder:
        """A recorder for other work in the same memory pool; each falls back independently of the other."""
        return GraphRecorder(self.device, subject, self.say, self.pool)

    def run(
        self,
        items: Sequence[WorkItem],
        *,
        gradients: bool = False,
        restart: Restart | None = None,
        around_capture: AroundCapture = nullcontext,
    ) -> Any:
        """As `Recorder.run`, from recordings where there are any."""
        self.replaying = None
        if self.before_run is not None:
            self.before_run()
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            if self.pool is None:
                return self.call(items)
            named = [item for item in items if item.name is not None]
            if self.warm.issuperset(item.key for item in named):
                if self._record(self.pool, named, around_capture, restart):
                    return self._replay(items)
                if self.pool is None:
                    return self.call(items)
            return self._warm_up(self.pool, items, gradients, restart)

    def drop(self, items: Iterable[WorkItem]) -> None:
        """Drop the recordings of these pieces, because the memory that they read or write is about to be freed."""
        for item in items:
            self.warm.discard(item.key)
            self.recordings.pop(item.key, None)

    def drop_all(self) -> None:
        """Drop all recordings."""
        self.warm.clear()
        self.recordings.clear()

    def drop_if_moved(self, model: nn.Module) -> None:
        """Drop all recordings if the weights of this model have moved in memory since."""
        if self.pool is None:
            return
        followed = weakref.ref(model), memory_key(model)
        if followed != self._followed:
            self.drop_all()
            self._followed = followed

    def _warm_up(self, pool: GraphPool, items: Sequence[WorkItem], gradients: bool, restart: Restart | None) -> Any:
        """Run the items without recording, so that kernels are compiled and chosen; if memory runs out, drop recordings."""
        with pool.on_stream() if gradients else nullcontext():
            while True:
                try:
                    result = self.call(items)
                    self.warm.update(item.key for item in items if item.name is not None)
                    return result
                except torch.OutOfMemoryError:
                    if not pool.is_used or restart is None or not restart():
                        raise
                pool.clear()  # not in the exception handler, which still holds the memory of the failed run

    def _record(
        self, pool: GraphPool, items: Sequence[WorkItem], around_capture: AroundCapture, restart: Restart | None
    ) -> bool:
        """Record the items that have no recording; return False on failure: for lack of memory, or permanently otherwise."""
        try:
            for item in items:
                if item.key not in self.recordings:
                    with around_capture():
                        self.recordings[item.key] = pool.record(item.function, item.inputs)
        except torch.OutOfMemoryError:
            if not pool.is_used or restart is None or not restart():
                raise
            pool.clear()
            return False
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            self.say(f"{self.subject} in eager mode, because recording failed: {reason}")
            self.pool = None
            self.drop_all()
            if restart is not None:
                restart()
            return False
        return True

    def _replay(self, items: Sequence[WorkItem]) -> Any:
        result = None
        for item in items:
            self.replaying = item
            result = item.function(*item.inputs) if item.name is None else self.recordings[item.key].replay(item.inputs)
        return result


def memory_key(model: nn.Module) -> Hashable:
    """The addresses of parameters and buffers: if one changes, recordings would read the old address."""
    return hash(tuple(tensor.data_ptr() for tensor in tensors_of(model)))
