"""The lock of a run folder: one process at a time, and which launch of torchrun it belongs to."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kilolayer.errors import InputError
from kilolayer.files.paths import kind_of
from kilolayer.files.reading import read_bytes
from kilolayer.files.writing import remove_drafts, unwritable
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


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock for this process; the lock of a dead process disappears with it."""
    path = folder / "lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except (OSError, ValueError) as error:
        raise unwritable(path, error) from None
    with os.fdopen(descriptor, "r+", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.readline(20).strip() or "another process"
            raise InputError(
                f"the folder is in use by process {owner}", where=str(folder), fix="wait for it, or choose another folder"
            ) from None
        try:
            file.seek(0)
            file.truncate()
            file.write("\n".join(filter(None, (str(os.getpid()), launch()))))
            file.flush()
        except OSError as error:
            raise unwritable(path, error) from None
        remove_drafts(folder)
        yield


def was_begun_by_this_launch(folder: Path) -> bool:
    """Whether torchrun has started this process again, and the run in the folder was begun before by the same torchrun."""
    if not is_restart() or kind_of(folder / "config.toml") != "file" or kind_of(folder / "lock") != "file":
        return False
    with suppress(InputError):
        return read_bytes(folder / "lock", 1 << 12).decode(errors="replace").partition("\n")[2] == launch()
    return False


def holder_of(folder: Path) -> int | None:
    """The id of the process that holds the folder's lock; 0 if the id is not known, None if no process holds it."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    with os.fdopen(descriptor, "r", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = file.readline(20).strip()
            return int(owner) if owner.isdecimal() else 0
    return None
