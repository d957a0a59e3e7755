"""Writes files atomically and durably, and never through a symbolic link.

A run folder may come from someone else. A link in it with the name of a file that we write could redirect our output to any
place. New files are therefore written next to their destination and renamed, which replaces a link without touching its target;
appending to a link is refused.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from kilolayer import hints
from kilolayer.errors import WriteError, file_fault

APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
PART = ".part"
"""Suffix of a file that is being written; a killed process may leave such a file behind."""


def write(path: Path, content: str | bytes) -> None:
    """Write a file atomically: a reader sees the old one or the new one, even after a power failure."""
    data = content.encode() if isinstance(content, str) else content
    draft = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}{PART}")
    try:
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(descriptor)
            os.replace(draft, path)
            sync(path.parent)
        except BaseException:
            with suppress(OSError, ValueError):
                draft.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:
        raise unwritable(path, error) from None


def append(path: Path, text: str) -> None:
    """Append text to a file, which is created if it does not exist."""
    try:
        data = text.encode()
        descriptor = os.open(path, APPEND, 0o666)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise WriteError("this is not a regular file", where=str(path), fix="remove it")
            if found.st_nlink > 1:
                # Other hard links to this file, as in a copy made by hard links, must not change.
                write(path, path.read_bytes() + data)
                return
            while data:
                data = data[os.write(descriptor, data) :]
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        if isinstance(error, WriteError):
            raise
        raise unwritable(path, error) from None


def move(path: Path, to: Path) -> None:
    """Rename a file within its folder, atomically and durably; a file with the new name is replaced."""
    try:
        os.replace(path, to)
        sync(to.parent)
    except (OSError, ValueError) as error:
        raise unwritable(to, error) from None


def remove(path: Path) -> None:
    """Delete a file if it exists."""
    try:
        path.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise unwritable(path, error) from None


def make_folder(path: Path) -> None:
    """Create a folder and its parents unless it exists; a symbolic link in its place is refused."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            raise WriteError(
                "this folder is a symbolic link, and files would be written elsewhere",
                where=str(path),
                fix="remove the link; to keep a run on another disk, link the whole run folder, or name it with "
                f"{hints.argument('run')}",
            )
    except (OSError, ValueError) as error:
        raise unwritable(path, error) from None


def check_writable(path: Path) -> None:
    """Raise if a file's folder cannot be written, before the work whose result it is to hold."""
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except (OSError, ValueError) as error:
        raise unwritable(path, error) from None


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unwritable(path: Path | str, error: OSError | ValueError) -> WriteError:
    """The error for a file that cannot be written."""
    reason, fix = file_fault(error)
    return WriteError(f"the file cannot be written: {reason}", where=str(path), fix=fix)
