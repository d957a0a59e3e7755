"""Identifies the torchrun that started this process, which is the same one after it has restarted its processes."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from kilolayer.terminal import under_torchrun

STARTED = 19
"""The place of a process's start time in /proc/PID/stat, counted from behind its name, which may hold spaces."""


def launch() -> str | None:
    """The run id, and the host, id and start time of the torchrun process: run ids may repeat. None without torchrun."""
    if not under_torchrun():
        return None
    parent, started = os.getppid(), ""
    with suppress(OSError, IndexError):
        started = Path(f"/proc/{parent}/stat").read_text(errors="replace").rpartition(")")[2].split()[STARTED]
    return f"{os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {parent} {started}"


def is_restart() -> bool:
    """Whether torchrun has started its processes again, after one of them died."""
    return under_torchrun() and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
