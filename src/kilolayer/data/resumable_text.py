"""The token file of a running text that a killed process has begun is continued; see `resumable_writer` for pairs."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from kilolayer.data.resumable_writer import JOURNAL
from kilolayer.data.store import LARGEST_DESCRIPTION, TOKEN_TYPES, TOKENS
from kilolayer.errors import InputError
from kilolayer.files.reading import read_json
from kilolayer.files.writing import remove, write

JOURNAL_EVERY = 32
"""Chunks, of about a megabyte of text, that may be lost."""
READ_BYTES = 1 << 24
COUNTS = ("chunks", "tokens", "bytes", "documents")


class ResumableTextWriter:
    """Appends tokens to the file in a folder, after those chunks that another process has written to it.

    counts: the number of chunks and of what they hold. digest: of all tokens.
    """

    def __init__(self, folder: Path, dtype: str) -> None:
        self.folder, self._type = folder, TOKEN_TYPES[dtype]
        self.counts, self.digest = _read_journal(folder, self._type.itemsize) or (dict.fromkeys(COUNTS, 0), hashlib.sha256())
        self._file = open(folder / TOKENS, "ab")  # noqa: SIM115  closed in __exit__
        self._file.truncate(self.counts["tokens"] * self._type.itemsize)

    def append(self, tokens: np.ndarray, text_bytes: int, documents: int) -> None:
        """Add a chunk."""
        data = tokens.astype(self._type).tobytes()
        self.digest.update(data)
        self._file.write(data)
        for name, more in zip(COUNTS, (1, len(tokens), text_bytes, documents), strict=True):
            self.counts[name] += more
        if self.counts["chunks"] % JOURNAL_EVERY == 0:
            self._file.flush()
            os.fsync(self._file.fileno())
            write(self.folder / JOURNAL, json.dumps({**self.counts, "digest": self.digest.hexdigest()}, indent=1))

    def complete(self) -> None:
        """Remove what is only needed to continue."""
        remove(self.folder / JOURNAL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()


def _read_journal(folder: Path, width: int) -> tuple[dict[str, int], Any] | None:
    """What was written, and a digest that can be continued; None if nothing can be used."""
    try:
        journal = read_json(folder / JOURNAL, LARGEST_DESCRIPTION)
        counts = {name: int(journal[name]) for name in COUNTS}
        digest, left = hashlib.sha256(), counts["tokens"] * width
        with open(folder / TOKENS, "rb") as file:
            while left > 0 and (data := file.read(min(left, READ_BYTES))):
                digest.update(data)
                left -= len(data)
        return (counts, digest) if digest.hexdigest() == journal["digest"] and not left else None
    except (OSError, InputError, ValueError, KeyError, TypeError, OverflowError):
        return None
