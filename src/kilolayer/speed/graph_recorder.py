"""Decides when work is recorded (after a warm-up, once per shape), and handles failed recordings and lack of memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from kilolayer.layers.modules import tensors_of
from kilolayer.runtime.recorder import AroundCapture, Piece, Recorder, Restart
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
        pieces: Sequence[Piece],
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
                return self.call(pieces)
            named = [piece for piece in pieces if piece.name is not None]
            if self.warm.issuperset(piece.key for piece in named):
                if self._record(self.pool, named, around_capture, restart):
                    return self._replay(pieces)
                if self.pool is None:
                    return self.call(pieces)
            return self._warm_up(self.pool, pieces, gradients, restart)

    def drop(self, pieces: Iterable[Piece]) -> None:
        """Drop the recordings of these pieces, because the memory that they read or write is about to be freed."""
        for piece in pieces:
            self.warm.discard(piece.key)
            self.recordings.pop(piece.key, None)

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

    def _warm_up(self, pool: GraphPool, pieces: Sequence[Piece], gradients: bool, restart: Restart | None) -> Any:
        """Run the pieces without recording, so that kernels are compiled and chosen; if memory runs out, drop recordings."""
        with pool.on_stream() if gradients else nullcontext():
            while True:
                try:
                    found = self.call(pieces)
                    self.warm.update(piece.key for piece in pieces if piece.name is not None)
                    return found
                except torch.OutOfMemoryError:
                    if not pool.is_used or restart is None or not restart():
                        raise
                pool.clear()  # not in the exception handler, which still holds the memory of the failed run

    def _record(self, pool: GraphPool, pieces: Sequence[Piece], around_capture: AroundCapture, restart: Restart | None) -> bool:
        """Record the pieces that have no recording; return False on failure: for lack of memory, or permanently otherwise."""
        try:
            for piece in pieces:
                if piece.key not in self.recordings:
                    with around_capture():
                        self.recordings[piece.key] = pool.record(piece.function, piece.inputs)
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

    def _replay(self, pieces: Sequence[Piece]) -> Any:
        found = None
        for piece in pieces:
            self.replaying = piece
            found = piece.function(*piece.inputs) if piece.name is None else self.recordings[piece.key].replay(piece.inputs)
        return found


def memory_key(model: nn.Module) -> Hashable:
    """The addresses of parameters and buffers: if one changes, recordings would read the old address."""
    return hash(tuple(tensor.data_ptr() for tensor in tensors_of(model)))
