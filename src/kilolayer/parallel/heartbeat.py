"""Detect a process that hangs.

Every second, each process publishes how many collective operations it has begun. All processes begin the same operations, and
none can pass one that another has not begun. So if a process has begun fewer for a long time, the others are waiting for it.
Writing or reading a file on a slow disk may take longer, so each process also publishes how many pieces of files it has done.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from kilolayer import hints
from kilolayer.terminal import say

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

POLL_SECONDS = 1.0
_begun = 0
_pieces = 0
_counting = threading.Lock()


def begin_collective() -> None:
    """Count a collective operation; call this before each one, in any thread."""
    global _begun
    with _counting:
        _begun += 1


def count_piece() -> None:
    """Count a piece of a file that has been written or read; in any thread."""
    global _pieces
    with _counting:
        _pieces += 1


@contextmanager
def watchdog(store: Store, rank: int, size: int, timeout: float, step: Callable[[], int]) -> Iterator[None]:
    """While this context is active on all processes, one that hangs for `timeout` seconds is reported, and all are ended.

    store: shared by the processes.
    step: returns the current step of this process.
    """
    watch = _Watch(store, rank, size, timeout, step)
    watch.publish()
    watch.start()
    try:
        yield
    finally:
        watch.done.set()
        watch.join(5)


class _Watch(threading.Thread):
    def __init__(self, store: Store, rank: int, size: int, timeout: float, step: Callable[[], int]) -> None:
        super().__init__(daemon=True, name="watches the other processes")
        self.store, self.rank, self.timeout, self.step = store, rank, timeout, step
        self.keys = [f"heartbeat {each}" for each in range(size)]
        self.done = threading.Event()

    def run(self) -> None:
        """Compare until done. The store disappears with torchrun, which ends the processes anyway, so its errors are
        ignored."""
        with suppress(RuntimeError):
            self._compare()
            self.store.set(self.keys[self.rank], "")

    def _compare(self) -> None:
        last, since = None, time.monotonic()
        while not self.done.wait(POLL_SECONDS):
            self.publish()
            found = self._read()
            if found is None or found != last:
                last, since = found, time.monotonic()
            elif time.monotonic() - since >= self.timeout:
                most = max(begun for begun, _, _ in found)
                behind = {rank: step for rank, (begun, step, _) in enumerate(found) if begun < most}
                if behind:
                    self._end(behind)

    def publish(self) -> None:
        """Publish this process's progress."""
        self.store.set(self.keys[self.rank], f"{_begun} {self.step()} {_pieces}")

    def _read(self) -> list[tuple[int, int, int]] | None:
        """Operations begun, step, and pieces of files of each process; None if one has left the context."""
        values = [self.store.get(key).decode() if self.store.check([key]) else f"-1 {self.step()} 0" for key in self.keys]
        if not all(values):
            return None
        return [(int(begun), int(step), int(pieces)) for begun, step, pieces in map(str.split, values)]

    def _end(self, behind: dict[int, int]) -> None:
        """Report and exit. An exception would not do: the main thread is blocked in an operation that cannot be interrupted."""
        speaker = next(rank for rank in range(len(self.keys)) if rank not in behind)
        if self.rank == speaker:
            for rank, step in behind.items():
                say(f"kilolayer: process {rank} has made no progress since step {step}")
            say(f"  the others have waited for {self.timeout:.0f} seconds (train.timeout)")
            resume = hints.argument("resume")
            say(f"  find out what blocks it, then continue with {resume}; if steps really take that long, raise train.timeout")
        else:
            time.sleep(2 * POLL_SECONDS)  # torchrun ends all processes when the first one ends
        os._exit(1)
