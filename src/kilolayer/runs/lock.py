"""The lock of a run folder: one process at a time, and the torchruns, one on each host, whose processes train the run."""

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


def agent() -> str | None:
    """The torchrun process that has started this one: run id, host, id and start time; None without torchrun."""
    if not under_torchrun():
        return None
    parent, started = os.getppid(), ""
    with suppress(OSError, IndexError):
        started = Path(f"/proc/{parent}/stat").read_text(errors="replace").rpartition(")")[2].split()[STARTED]
    return f"{os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {parent} {started}"


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
            file.write("\n".join(filter(None, (str(os.getpid()), agent()))))
            file.flush()
        except OSError as error:
            raise unwritable(path, error) from None
        remove_drafts(folder)
        yield


def join_launch(folder: Path) -> None:
    """Add the torchrun of this process to those in the lock, which the first process holds for all."""
    own = agent()
    if own is not None and own not in _held_by(folder)[1:]:
        with suppress(OSError), (folder / "lock").open("a") as file:
            file.write(f"\n{own}")


def was_begun_by_this_launch(folder: Path) -> bool:
    """Whether processes of the same torchrun as this one's began the run in the folder before this process existed."""
    if not under_torchrun() or kind_of(folder / "config.toml") != "file":
        return False
    process, *agents = _held_by(folder) or [""]
    return process != str(os.getpid()) and agent() in agents


def _held_by(folder: Path) -> list[str]:
    """The lines of the lock: the process that held it last, and the torchruns of the run; none if there is no lock."""
    if kind_of(folder / "lock") == "file":
        with suppress(InputError):
            return read_bytes(folder / "lock", 1 << 16).decode(errors="replace").splitlines()
    return []


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
