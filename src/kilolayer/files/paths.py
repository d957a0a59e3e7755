"""Paths are asked here what stands at them. A name that the system does not take, a circle of links or a folder that may not be
searched is an error that names the path."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Literal

from kilolayer.errors import InputError, file_fault
from kilolayer.files.reading import unreadable


def resolve(path: Path) -> Path:
    """The absolute path, its symbolic links followed."""
    try:
        return path.resolve()
    except RuntimeError:
        raise InputError(
            "the path is a circle of symbolic links", where=str(path), fix="remove the link that points at itself"
        ) from None
    except (OSError, ValueError) as error:
        reason, fix = file_fault(error)
        raise InputError(f"the path cannot be used: {reason}", where=str(path), fix=fix) from None


def storable(path: Path) -> Path:
    """The absolute path, as configurations keep it; a name that is not UTF-8 raises."""
    found = resolve(path)
    try:
        str(found).encode()
    except UnicodeEncodeError:
        raise InputError(
            "the path is not UTF-8, and config.toml could not hold it",
            where=str(found),
            fix="rename the file or folder, or one above it",
        ) from None
    return found


def kind_of(path: Path) -> Literal["file", "folder", "other"] | None:
    """What stands at a path, its symbolic links followed: `other` is a pipe or a device; None: nothing."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"
