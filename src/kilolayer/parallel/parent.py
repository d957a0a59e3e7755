"""Make a child process end with its parent."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

POLL_SECONDS = 1.0


def when_parent_dies(parent: int, act: Callable[[], None]) -> None:
    """Call `act`, in a thread, soon after the process `parent`, this process's parent, has ended."""

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        act()

    threading.Thread(target=wait, daemon=True, name="waits for the parent's end").start()
