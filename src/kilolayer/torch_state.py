"""What torch has once for the whole process: its random state and its number of threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING

from kilolayer.errors import InputError

if TYPE_CHECKING:
    import torch

_lock = RLock()  # a tracker may diagnose the run that it follows, in the thread that trains
_holders: list[str] = []


@contextmanager
def own_torch_state(call: str, devices: Iterable[torch.device] | None = None) -> Iterator[None]:
    """Hold torch's random state and its number of threads, and restore them at the end; raises if another thread holds them.

    call: what needs them, for the error that another thread gets. devices: the GPUs whose random state is restored; by default
    the current one.
    """
    import torch

    if not _lock.acquire(blocking=False):
        raise InputError(
            f"another {next(iter(_holders), call)} is running in this process, and both would draw from torch's random numbers",
            fix="wait for it, or train in processes: kl.run_comparison trains several runs at once",
        )
    try:
        _holders.append(call)
        threads = torch.get_num_threads()
        if devices is None:
            devices = [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.device_count() else []
        try:
            with torch.random.fork_rng(list(devices)):
                yield
        finally:
            torch.set_num_threads(threads)
            _holders.pop()
    finally:
        _lock.release()
