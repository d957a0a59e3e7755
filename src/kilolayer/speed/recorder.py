"""Decides when work is recorded (after a warm-up, once per shape), and handles failed recordings and lack of memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kilolayer.layers.modules import tensors_of
from kilolayer.speed.graph import GraphPool, Recording

Restart = Callable[[], bool]
AroundCapture = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Piece:
    """A piece of work, `function(*inputs)`, that reads nothing back from the device.

    name: distinguishes it from other pieces with inputs of the same shapes; None if it must not be recorded.
    """

    name: Hashable | None
    function: Callable[..., Any]
    inputs: tuple[Tensor, ...] = ()

    @property
    def key(self) -> Hashable:
        """The shape key: one recording can be used for all pieces with the same key."""
        return self.name, *(tuple(each.shape) for each in self.inputs)


class Recorder:
    """Runs work. On a GPU, the first run of each shape key is a warm-up, the second is recorded, and all later ones replay it.

    subject: the beginning of the message about a fallback, such as "steps run".
    pool: the memory of the recordings; None if nothing is recorded.
    before_run: called at the beginning of each run. replaying: the piece that was most recently replayed in the last run.
    """

    def __init__(self, device: torch.device, subject: str, say: Callable[[str], None], pool: GraphPool | None) -> None:
        self.device, self.subject, self.say, self.pool = device, subject, say, pool
        self.warm: set[Hashable] = set()
        self.recordings: dict[Hashable, Recording] = {}
        self.before_run: Callable[[], None] | None = None
        self.replaying: Piece | None = None
        self._followed: tuple[weakref.ref[nn.Module], Hashable] | None = None
        if pool is not None:
            pool.recordings.append(self.recordings)

    @classmethod
    def plain(cls, device: torch.device) -> Recorder:
        """A recorder that records nothing."""
        return cls(device, "work runs", print, None)

    def sharing_pool(self, subject: str) -> Recorder:
        """A recorder for other work in the same memory pool; each falls back independently of the other."""
        return Recorder(self.device, subject, self.say, self.pool)

    def run(
        self,
        pieces: Sequence[Piece],
        *,
        gradients: bool = False,
        restart: Restart | None = None,
        around_capture: AroundCapture = nullcontext,
    ) -> Any:
        """Run the pieces in order; return the result of the last one, which is valid until the next run.

        gradients: the pieces compute gradients. restart: undoes what the pieces have done so far, so that they can be run again
        after memory has been freed; returns False if it is too late for that. Without it, they are not run again.
        around_capture: a context that is entered while a piece is captured.
        """
        self.replaying = None
        if self.before_run is not None:
            self.before_run()
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            if self.pool is None:
                return self._run_plainly(pieces)
            named = [piece for piece in pieces if piece.name is not None]
            if self.warm.issuperset(piece.key for piece in named):
                if self._record(self.pool, named, around_capture, restart):
                    return self._replay(pieces)
                if self.pool is None:
                    return self._run_plainly(pieces)
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

    def _run_plainly(self, pieces: Sequence[Piece]) -> Any:
        found = None
        for piece in pieces:
            found = piece.function(*(each.to(self.device, non_blocking=True) for each in piece.inputs))
        return found

    def _warm_up(self, pool: GraphPool, pieces: Sequence[Piece], gradients: bool, restart: Restart | None) -> Any:
        """Run the pieces without recording, so that kernels are compiled and chosen; if memory runs out, drop recordings."""
        with pool.on_stream() if gradients else nullcontext():
            while True:
                try:
                    found = self._run_plainly(pieces)
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
