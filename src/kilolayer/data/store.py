"""Token files: the tokens of many sentence pairs on disk, memory-mapped.

A folder holds the tokens, an index (each pair's offset, and the lengths of its source and target) and a description. A pair's
target follows its source, so reading a pair touches two files: index and tokens. Sources are as the model reads them, with
tags and end token; targets are as the model should write them, with end token.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np

from kilolayer.data.filters import FilterReport
from kilolayer.errors import InputError
from kilolayer.files.paths import kind_of
from kilolayer.files.reading import open_descriptor, open_regular, read_json

LARGEST_DESCRIPTION = 1 << 20
TOKENS, INDEX, DESCRIPTION = "tokens.bin", "index.bin", "pairs.json"
TOKEN_TYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
INDEX_TYPE = np.dtype([("start", "<u8"), ("source", "<u4"), ("target", "<u4")])


def token_type(vocab_size: int) -> str:
    """The smallest of TOKEN_TYPES that holds all tokens of a vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class PairWriter:
    """Writes the token files of a folder from a stream of pairs."""

    def __init__(self, folder: Path, vocab_size: int, mode: Literal["wb", "ab"] = "wb") -> None:
        self.folder, self.vocab_size = folder, vocab_size
        self.dtype = token_type(vocab_size)
        self.pairs = self.tokens = 0
        self._digest = hashlib.sha256()
        self._files = [open(folder / name, mode) for name in (TOKENS, INDEX)]  # noqa: SIM115  closed in __exit__

    def append(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> None:
        """Add pairs of id sequences."""
        rows = chain.from_iterable(zip(sources, targets, strict=True))
        tokens = np.fromiter(chain.from_iterable(rows), np.int64)
        self.append_flat(tokens, np.array([*map(len, sources)], np.int64), np.array([*map(len, targets)], np.int64))

    def append_flat(self, tokens: np.ndarray, source_lengths: np.ndarray, target_lengths: np.ndarray) -> None:
        """Add pairs given as concatenated tokens: source, target, source, target, ..."""
        if len(tokens) and not 0 < tokens.min() <= tokens.max() < self.vocab_size:  # 0 is padding
            raise InputError(f"a token is not in 1 to {self.vocab_size - 1}", where=str(self.folder))
        index = np.empty(len(source_lengths), INDEX_TYPE)
        index["source"], index["target"] = source_lengths, target_lengths
        lengths = index["source"].astype(np.uint64) + index["target"]
        index["start"] = np.uint64(self.tokens) + np.cumsum(lengths) - lengths
        for file, data in zip(self._files, (tokens.astype(TOKEN_TYPES[self.dtype]).tobytes(), index.tobytes()), strict=True):
            self._digest.update(data)
            file.write(data)
        self.pairs, self.tokens = self.pairs + len(source_lengths), self.tokens + len(tokens)

    def finish(self, report: FilterReport) -> None:
        """Write the description, without which the folder cannot be opened."""
        description = {
            "pairs": self.pairs,
            "tokens": self.tokens,
            "dtype": self.dtype,
            "vocab_size": self.vocab_size,
            "digest": self._digest.hexdigest(),
            "report": dataclasses.asdict(report),
        }
        (self.folder / DESCRIPTION).write_text(json.dumps(description, indent=1))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for file in self._files:
            file.close()


class TokenPairs:
    """Pairs of token sequences in a folder of token files, read on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            description = read_json(folder / DESCRIPTION, LARGEST_DESCRIPTION)
            self.pairs, total, self.vocab_size = (int(description[name]) for name in ("pairs", "tokens", "vocab_size"))
            self.report = FilterReport(**{name: int(count) for name, count in description["report"].items()})
            self.digest = str(description["digest"])  # identifies the pairs, wherever the folder is
            stored_type = TOKEN_TYPES[description["dtype"]]
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            raise damaged(folder, DESCRIPTION) from None
        self._maps: list[mmap.mmap] = []
        self._open: dict[str, KeptFile] = {}
        self.tokens = self._map(TOKENS, stored_type, total)
        self.index = self._map(INDEX, INDEX_TYPE, self.pairs)

    @property
    def source_lengths(self) -> np.ndarray:
        """uint32 [pairs], including tags and end token; a view of the file."""
        return self.index["source"]

    @property
    def target_lengths(self) -> np.ndarray:
        """uint32 [pairs], including the end token; a view of the file."""
        return self.index["target"]

    @property
    def bytes(self) -> int:
        """Size of the mapped files in bytes."""
        return self.tokens.nbytes + self.index.nbytes

    def __len__(self) -> int:
        return self.pairs

    def source(self, i: int) -> np.ndarray:
        """Tokens [source length]: the model's input, including tags and end token."""
        start, source, _ = self.index[i].tolist()
        return self.tokens[start : start + source]

    def target(self, i: int) -> np.ndarray:
        """Tokens [target length]: the expected output, including the end token."""
        start, source, target = self.index[i].tolist()
        return self.tokens[start + source : start + source + target]

    def fetch(self, pairs: np.ndarray, *, read: bool) -> tuple[np.ndarray, np.ndarray]:
        """A token array, and the index entries of the given pairs into it.

        read: copy these pairs out of the files. Otherwise the array is the mapped file, which is faster but brings many pages
        around each pair into this process's memory.
        """
        if not read:
            return self.tokens, self.index[pairs]
        width = INDEX_TYPE.itemsize
        self.keep_open()
        index = np.frombuffer(self._open[INDEX].read_spans([(i * width, width) for i in pairs.tolist()]), INDEX_TYPE)
        lengths = index["source"].astype(np.uint64) + index["target"]
        spans = np.stack([index["start"], lengths], axis=1) * np.uint64(self.tokens.itemsize)
        index["start"] = np.cumsum(lengths) - lengths
        return np.frombuffer(self._open[TOKENS].read_spans(spans.tolist()), self.tokens.dtype), index

    def read_index(self, begin: int, end: int) -> np.ndarray:
        """The index entries of consecutive pairs, copied out of the file; mapping it would bring many pages around them."""
        self.keep_open()
        span = begin * INDEX_TYPE.itemsize, (end - begin) * INDEX_TYPE.itemsize
        return np.frombuffer(self._open[INDEX].read_spans([span]), INDEX_TYPE)

    def keep_open(self) -> None:
        """Open the files that `fetch` reads, so that they can be deleted, moved or replaced safely."""
        for name in (TOKENS, INDEX):
            if name not in self._open:
                self._open[name] = KeptFile(self.folder / name)

    def release(self) -> None:
        """Release the pages read so far: they stay in the system's cache, but no longer count as this process's memory."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped in self._maps:
                mapped.madvise(mmap.MADV_DONTNEED)

    def _map(self, name: str, dtype: np.dtype, count: int) -> np.ndarray:
        if kind_of(self.folder / name) != "file":
            raise damaged(self.folder, name)
        with open_regular(self.folder / name) as file:
            if os.fstat(file.fileno()).st_size != count * dtype.itemsize:
                raise damaged(self.folder, name)
            if not count:
                return np.zeros(0, dtype)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._maps.append(mapped)
        return np.frombuffer(mapped, dtype)


class KeptFile:
    """A file that stays open for the lifetime of this object, so it can be read even after it was deleted."""

    def __init__(self, path: Path) -> None:
        self._descriptor = open_descriptor(path)
        weakref.finalize(self, os.close, self._descriptor)

    @property
    def size(self) -> int:
        """Size in bytes."""
        return os.fstat(self._descriptor).st_size

    def read_spans(self, spans: Iterable[Sequence[int]]) -> bytearray:
        """The concatenated bytes of spans (offset, length)."""
        return bytearray().join([os.pread(self._descriptor, length, offset) for offset, length in spans])


def damaged(folder: Path, name: str) -> InputError:
    """The error for token files that have changed since they were written."""
    return InputError(
        f"the token files are damaged: {name}", where=str(folder), fix="delete the folder; it will be created again"
    )
