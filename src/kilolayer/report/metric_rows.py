"""Reads the rows of metrics.jsonl; a broken line loses only itself."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from kilolayer.errors import InputError
from kilolayer.files.reading import open_regular, parse_json

MOST = 1 << 32
"""Maximum size of the file, in bytes."""
LONGEST = 1 << 26
"""Maximum length of a line, in bytes."""
NAMED = 10


@dataclass
class Rows:
    """The rows of metrics.jsonl: objects with a kind and a step.

    broken: numbers of the lines that are not such rows. cut: the last line has no end, because the run was killed or is still
    writing.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)
    cut: bool = False

    @property
    def warning(self) -> str | None:
        """A message on what was left out; None if nothing was."""
        if not self.broken:
            return None
        shown = ", ".join(map(str, self.broken[:NAMED])) + (
            f" and {len(self.broken) - NAMED:,} more" if len(self.broken) > NAMED else ""
        )
        if len(self.broken) == 1:
            return f"line {shown} of metrics.jsonl cannot be read and is left out"
        return f"lines {shown} of metrics.jsonl cannot be read and are left out"


def read_rows(path: Path) -> Rows:
    """All rows of a file that can be read; none if there is no file."""
    rows = Rows()
    if not os.path.lexists(path):
        return rows
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST:
            raise InputError(
                f"the file has {size:,} bytes, and at most {MOST:,} are read here",
                where=str(path),
                fix="move it away: the run continues, and its curves start again",
            )
        for number, line in enumerate(_lines(file), 1):
            if not line.strip():
                continue
            row = _row(line)
            if row is not None:
                rows.rows.append(row)
            elif line.endswith(b"\n"):
                rows.broken.append(number)
            else:
                rows.cut = True
    return rows


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines; of one that is too long, only its end, which is not valid JSON."""
    while line := file.readline(LONGEST):
        while len(line) == LONGEST and not line.endswith(b"\n"):
            line = b"?" + file.readline(LONGEST - 1)
        yield line


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_json(line.decode())
    except ValueError:
        return None
    match row:
        case {"kind": str(), "step": int() | float() as step} if not isinstance(step, bool) and _is_finite(step):
            return row
    return None


def _is_finite(step: float) -> bool:
    return abs(step) < 2**63 if isinstance(step, int) else math.isfinite(step)
