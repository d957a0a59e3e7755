"""Writes files atomically and durably, and never through a symbolic link.

A run folder may come from someone else. A link in it with the name of a file that we write could redirect our output to any
place. New files are therefore written next to their destination and renamed, which replaces a link without touching its target;
appending to a link is refused.

Such a draft is locked by the process that writes it. The operating system releases the lock when the process dies, so the next
write to the same path can tell which drafts are abandoned, and removes them.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kilolayer import hints
from kilolayer.errors import WriteError, file_fault

APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
PART = ".part"
"""Suffix of a file or a folder that is being written; a killed process may leave it behind."""
LONGEST_NAME = 200
"""Bytes of a name that the name of its draft repeats."""


def write(path: Path, content: str | bytes) -> None:
    """Write a file atomically: a reader sees the old one or the new one, even after a power failure."""
    data = content.encode() if isinstance(content, str) else content
    try:
        with draft_of(path) as draft:
            write_parts(draft, [data])
            os.replace(draft, path)
            sync(path.parent)
    except (OSError, ValueError) as error:
        raise unwritable(path, error) from None


@contextmanager
def draft_of(path: Path, *, folder: bool = False, stays: bool = False) -> Iterator[Path]:
    """A new empty file, or folder, next to `path`, which the caller fills and renames to it.

    If an error is raised, the draft is removed, unless it `stays`. Drafts of `path` that a killed process left are removed at
    the end.
    """
    draft, descriptor = _new_draft(path, folder)
    try:
        yield draft
    except BaseException:
        if not stays:
            _discard(draft)
        raise
    else:
        remove_drafts(path.parent, path.name)
    finally:
        os.close(descriptor)


def _new_draft(path: Path, folder: bool) -> tuple[Path, int]:
    """A new draft and the descriptor that holds its lock."""
    while True:
        draft = path.with_name(f".{_cut(path.name)}.{secrets.token_hex(4)}{PART}")
        if folder:
            draft.mkdir()
        flags = os.O_RDONLY if folder else os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = os.open(draft, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with suppress(OSError):  # a file system without locks: its drafts are never taken for abandoned
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.path.lexists(draft):
            return draft, descriptor
        os.close(descriptor)  # removed as abandoned between its creation and its lock


def remove_drafts(folder: Path, name: str | None = None) -> None:
    """Remove the drafts in a folder whose process is dead: those of the file `name`, or of any file."""
    pattern = re.compile(rf"\.{'.*' if name is None else re.escape(_cut(name))}\.[0-9a-f]{{8}}{re.escape(PART)}", re.DOTALL)
    with suppress(OSError):
        for entry in os.scandir(folder):
            if pattern.fullmatch(entry.name):
                _remove_abandoned(Path(entry.path), entry.is_dir(follow_symlinks=False))


def _remove_abandoned(draft: Path, folder: bool) -> None:
    with suppress(OSError):  # its writer is alive, another process has just removed it, or it belongs to another user
        # NFS can lock only files that are open for writing.
        flags = os.O_RDONLY | os.O_DIRECTORY if folder else os.O_WRONLY
        descriptor = os.open(draft, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _discard(draft)
        finally:
            os.close(descriptor)


def _discard(draft: Path) -> None:
    if draft.is_dir() and not draft.is_symlink():
        shutil.rmtree(draft, ignore_errors=True)
    else:
        with suppress(OSError, ValueError):
            draft.unlink(missing_ok=True)


def _cut(name: str) -> str:
    return os.fsencode(name)[:LONGEST_NAME].decode(errors="ignore")


def write_parts(draft: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write the parts of a file one after the other, to disk."""
    descriptor = os.open(draft, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(descriptor)


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


def json_value(value: Any) -> Any:
    """The value as JSON can hold it: in place of numbers that are not finite, None."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(key): json_value(each) for key, each in value.items()}
        case list() | tuple():
            return [json_value(each) for each in value]
        case _:
            return value
