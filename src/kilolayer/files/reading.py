"""Reads files safely.

Whatever is at a path (nothing, a pipe, a device, 40 GB, invalid UTF-8), an error that names the path is raised soon and without
using much memory.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kilolayer.errors import InputError, UnreadableError, file_fault

DEEPEST = 100
"""Maximum nesting of objects and arrays in JSON."""
SMALL = 1 << 28
"""Maximum size in bytes of a file that is read whole, unless the caller says otherwise."""
NOT_A_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.ENAMETOOLONG, None}
"""Error codes that mean that there is no file to read; with any other code there may be one."""


@contextmanager
def open_regular(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file for reading. A folder, a pipe or a device raises at once, because reading it might never end."""
    with os.fdopen(open_descriptor(path), "rb") as file:
        try:
            yield file
        except OSError as error:
            raise unreadable(path, error) from None


def open_descriptor(path: Path) -> int:
    """The descriptor of a file opened for reading; the caller closes it."""
    try:
        # Non-blocking: opening a pipe that has no writer would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise unreadable(path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
    raise InputError("this is not a regular file", where=str(path), fix="put a regular file in its place")


def read_bytes(path: Path, most: int = SMALL) -> bytes:
    """The contents of a file of at most `most` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(most + 1) if size <= most else b""
        if size > most or len(data) > most:
            raise InputError(
                f"the file has {max(size, len(data)):,} bytes, and at most {most:,} are read here",
                where=str(path),
                fix="this is not a file that Kilolayer wrote: put the right one in its place",
            )
        return data


def read_text(path: Path, most: int = SMALL) -> str:
    """The contents of a UTF-8 file."""
    try:
        return read_bytes(path, most).decode()
    except UnicodeDecodeError as error:
        raise InputError(
            "the file is not UTF-8 text", where=f"{path}, byte {error.start + 1:,}", fix="save it as UTF-8"
        ) from None


def read_json(path: Path, most: int = SMALL) -> Any:
    """The value in a JSON file."""
    try:
        return parse_json(read_bytes(path, most))
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"the file is not valid JSON: {error}", where=str(path), fix="put the right file in its place"
        ) from None


def replace_surrogates(text: str) -> str:
    """The text with lone surrogates, which JSON allows, replaced, so that UTF-8 can encode it."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; anything wrong with it, including excessive nesting, is a ValueError."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    opening = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    if sum(text.count(each) for each in opening) > DEEPEST:  # pyright: ignore[reportArgumentType]
        check_depth(value, DEEPEST)
    return value


def check_depth(value: Any, most: int) -> None:
    """Raise a ValueError if a value has more than `most` levels of nesting, since printing it might fail."""
    level = [value]
    for _ in range(most + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return
        level = [below for each in level for below in (each.values() if isinstance(each, dict) else each)]
    raise ValueError(f"it has tables and lists inside one another, more than {most}")


def unreadable(path: Path | str, error: OSError | ValueError) -> InputError:
    """The error for a file that cannot be read."""
    if isinstance(error, FileNotFoundError):
        return InputError("the file does not exist", where=str(path), fix="check the path")
    reason, fix = file_fault(error)
    kind = InputError if getattr(error, "errno", None) in NOT_A_FILE else UnreadableError
    return kind(f"the file cannot be read: {reason}", where=str(path), fix=fix)
