"""Resolves and inspects paths.

A name that the system does not accept, a loop of links, or a folder that may not be searched raises an error with the path.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, Literal

from kilolayer.errors import InputError, edit_distance, file_fault, nearest, shown
from kilolayer.files.reading import unreadable

SLIPS, MOST_NAMES = 2, 1000


def resolve(path: Path) -> Path:
    """The absolute path, with symbolic links resolved."""
    try:
        return path.resolve()
    except RuntimeError:
        raise InputError(
            "the path is a loop of symbolic links", where=str(path), fix="remove the link that points to itself"
        ) from None
    except (OSError, ValueError) as error:
        reason, fix = file_fault(error)
        raise InputError(f"the path cannot be used: {reason}", where=str(path), fix=fix) from None


def storable(path: Path) -> Path:
    """The absolute path in the form that configurations store; a name that is not UTF-8 raises."""
    found = resolve(path)
    try:
        str(found).encode()
    except UnicodeEncodeError:
        raise InputError(
            "the path is not UTF-8, and cannot be written in config.toml",
            where=str(found),
            fix="rename the file or folder, or one above it",
        ) from None
    return found


def as_path(value: Any, what: str) -> Path:
    """The path given as text or as a path object in Python; anything else raises. what: its name in the error."""
    try:
        return Path(value)
    except TypeError:
        raise InputError(f"{what} is {shown(value)}, not a path", fix='give a string such as "runs/mine", or a Path') from None


def did_you_mean(path: Path) -> str:
    """The addition to an error about a path that does not exist: a similar name next to it; "" if there is none."""
    try:
        names = [name for name in os.listdir(path.parent) if path.name in name or abs(len(name) - len(path.name)) <= SLIPS]
    except (OSError, ValueError):
        return ""
    meant = nearest(path.name, names[:MOST_NAMES]) if path.name and names else None
    if meant is None or (path.name not in meant and edit_distance(path.name, meant) > SLIPS):
        return ""
    return f"; did you mean {str(path.with_name(meant))!r}?"


def kind_of(path: Path) -> Literal["file", "folder", "other"] | None:
    """What is at a path, after symbolic links: `other` is a pipe or a device; None: nothing."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"
