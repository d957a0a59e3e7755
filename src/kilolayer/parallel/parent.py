"""A process that ends with the one that started it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

POLL_SECONDS = 1.0


def when_parent_dies(parent: int, act: Callable[[], None]) -> None:
    """Call `act`, in a thread, soon after the process `parent` has ended, whose child this one is."""

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        act()

    threading.Thread(target=wait, daemon=True, name="waits for the parent's end").start()
