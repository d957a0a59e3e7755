"""Files that are written and hashed in pieces of 64 MiB by several threads.

A single thread would take a minute for the checkpoint of a thousand layers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from functools import partial
from multiprocessing.pool import ThreadPool  # unlike concurrent.futures, it does not delay the exit of the process
from pathlib import Path
from typing import Any

from kilolayer.files.reading import open_regular
from kilolayer.parallel.heartbeat import count_piece

PIECE = 1 << 26
"""Bytes of a file that are hashed as one piece."""
THREADS = min(8, os.cpu_count() or 1)


def write_hashed(path: Path, parts: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write the parts one after the other and return the file's `fingerprint`, once it is on disk."""
    pieces = _pieces(parts)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "wb") as file, ThreadPool(THREADS) as pool:
        hashes = pool.map(partial(_write_piece, file.fileno()), enumerate(pieces), chunksize=1)
        os.fsync(file.fileno())
    return {"bytes": sum(len(part) for piece in pieces for part in piece), "sha256": hashes}


def _pieces(parts: Iterable[bytes | memoryview]) -> list[list[memoryview]]:
    """Cut the parts into pieces of PIECE bytes; the last piece may be shorter."""
    pieces: list[list[memoryview]] = [[]]
    room = PIECE
    for part in parts:
        rest = memoryview(part)
        while len(rest) > room:
            pieces[-1].append(rest[:room])
            pieces.append([])
            rest, room = rest[room:], PIECE
        pieces[-1].append(rest)
        room -= len(rest)
    return pieces


def _write_piece(descriptor: int, piece: tuple[int, list[memoryview]]) -> str:
    number, parts = piece
    digest, offset = hashlib.sha256(), number * PIECE
    for part in parts:
        digest.update(part)
        rest = part
        while rest:
            count = os.pwrite(descriptor, rest, offset)
            rest, offset = rest[count:], offset + count
    # A disk that is slow is so here, piece by piece, and not once for a whole file, which would look like a hang.
    _on_disk(descriptor)
    count_piece()
    return digest.hexdigest()


def _on_disk(descriptor: int) -> None:
    """Wait until what has been written to a file is on the disk."""
    getattr(os, "fdatasync", os.fsync)(descriptor)  # macOS has no fdatasync


def fingerprint(path: Path) -> dict[str, Any]:
    """The size of a file in bytes, and the SHA-256 of each piece: its entry in a manifest."""
    with open_regular(path) as file, ThreadPool(THREADS) as pool:
        size = os.fstat(file.fileno()).st_size
        return {"bytes": size, "sha256": pool.map(partial(_hash_piece, file.fileno()), offsets(size), chunksize=1)}


def offsets(size: int) -> range:
    """The offsets of the pieces of a file of `size` bytes."""
    return range(0, max(size, 1), PIECE)


def _hash_piece(descriptor: int, start: int) -> str:
    digest, end = hashlib.sha256(), start + PIECE
    for offset in range(start, end, 1 << 20):
        digest.update(os.pread(descriptor, min(1 << 20, end - offset), offset))
    count_piece()
    return digest.hexdigest()
