"""What reading a large file has shown, such as its digest or its number of lines, is kept until the file changes.

A file counts as unchanged if its size, its inode and both of its time stamps are: any write sets the time of change, which
programs cannot set back. A file that changed just before it was read is not recorded, because a second write within the
resolution of the clock would not show.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from kilolayer.errors import InputError, WriteError
from kilolayer.files.reading import read_json
from kilolayer.files.writing import write

LARGE_FILE = 64 << 20
"""Bytes; smaller files are read again each time."""
SETTLED_SECONDS = 2
LARGEST_RECORD = 1 << 16
Fact = TypeVar("Fact", str, int)


def known(path: Path, name: str, find: Callable[[Path], Fact], cache: Path | None) -> Fact:
    """`find(path)`, or what it returned before if the file is large and has not changed. name: of the fact in its record."""
    stamp = _stamp(path) if cache is not None else None
    if cache is None or stamp is None or stamp[0] < LARGE_FILE:
        return find(path)
    record_path = cache / f"facts-{hashlib.sha256(str(path.absolute()).encode(errors='surrogateescape')).hexdigest()[:24]}.json"
    facts = _recorded(record_path, stamp)
    started = time.time()
    if name in facts:
        return facts[name]
    found = find(path)
    if _stamp(path) == stamp and started - max(stamp[2:]) / 1e9 > SETTLED_SECONDS:
        with suppress(WriteError, OSError):  # a cache that is read-only still serves
            cache.mkdir(parents=True, exist_ok=True)
            write(record_path, json.dumps({"stamp": stamp, "facts": {**facts, name: found}}))
    return found


def _stamp(path: Path) -> list[int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]


def _recorded(path: Path, stamp: list[int]) -> dict[str, Any]:
    try:
        record = read_json(path, LARGEST_RECORD)
        return dict(record["facts"]) if record["stamp"] == stamp else {}
    except (OSError, InputError, ValueError, KeyError, TypeError):
        return {}
