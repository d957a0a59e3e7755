"""Files are opened here. Whatever is in their place (nothing, a pipe, a device, 40 GB, half a character), an error comes soon,
in little memory, and names the path."""

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
"""Tables and lists inside one another, in JSON."""
SMALL = 1 << 28
"""Bytes that a file which is read whole may have, unless its reader says otherwise."""
NOT_A_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.ENAMETOOLONG, None}
"""What the system answers where there is no file to read; with every other answer there may be one."""


@contextmanager
def open_regular(path: Path) -> Iterator[io.BufferedReader]:
    """A file, open to read. A folder, a pipe or a device raises at once: reading it could wait, or go on, for ever."""
    with os.fdopen(open_descriptor(path), "rb") as file:
        try:
            yield file
        except OSError as error:
            raise unreadable(path, error) from None


def open_descriptor(path: Path) -> int:
    """The descriptor of a file, open to read; whoever asks for it closes it."""
    try:
        # Not blocking: a pipe that nobody writes to would hold the opening itself.
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
    """All of a file of at most `most` bytes."""
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
    """All of a UTF-8 file."""
    try:
        return read_bytes(path, most).decode()
    except UnicodeDecodeError as error:
        raise InputError(
            "the file is not UTF-8 text", where=f"{path}, byte {error.start + 1:,}", fix="save it as UTF-8"
        ) from None


def read_json(path: Path, most: int = SMALL) -> Any:
    """What a JSON file holds."""
    try:
        return parse_json(read_bytes(path, most))
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"the file is not valid JSON: {error}", where=str(path), fix="put the right file in its place"
        ) from None


def whole_characters(text: str) -> str:
    """A text of JSON, which may spell half a character, as UTF-8 can hold it."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def parse_json(text: str | bytes) -> Any:
    """What a JSON text holds; all that is wrong with it, also brackets without end, is a ValueError."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    opening = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    if sum(text.count(each) for each in opening) > DEEPEST:  # pyright: ignore[reportArgumentType]
        check_depth(value, DEEPEST)
    return value


def check_depth(value: Any, most: int) -> None:
    """A ValueError where there are more than `most` tables and lists inside one another: to show such a value may fail."""
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
