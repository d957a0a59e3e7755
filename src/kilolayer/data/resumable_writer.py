"""Token files that a killed process has begun are continued.

Beside the token files, a folder holds the number of pairs in each chunk, and a journal, replaced now and then, that says how
many chunks were written. The token files are cut to this length and checked against the journal's digest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from kilolayer.data.filters import FilterReport
from kilolayer.data.store import INDEX, INDEX_TYPE, LARGEST_DESCRIPTION, TOKEN_TYPES, TOKENS, PairWriter, token_type
from kilolayer.errors import InputError
from kilolayer.files.reading import read_json
from kilolayer.files.writing import remove, write

JOURNAL, CHUNKS = "journal.json", "chunks.bin"
CHUNK_TYPE = np.dtype("<u4")
JOURNAL_EVERY = 64
"""Chunks that may be lost: about 260,000 pairs, or some seconds of work on one core."""


class ResumablePairWriter(PairWriter):
    """Writes the token files of a folder, after those chunks that another process has written to it.

    chunks: how many have been written. report: what the filters removed from them.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        written = _read_journal(folder, token_type(vocab_size))
        for name in (TOKENS, INDEX, CHUNKS):
            if written is None:
                remove(folder / name)
            else:
                os.truncate(folder / name, written["bytes"][name])
        super().__init__(folder, vocab_size, mode="ab")
        self.chunks, self.report = 0, FilterReport()
        self._chunks = open(folder / CHUNKS, "ab")  # noqa: SIM115  closed in __exit__
        if written is not None:
            self.chunks, self.pairs, self.tokens = (written[name] for name in ("chunks", "pairs", "tokens"))
            self.report, self._digest = FilterReport(**written["report"]), written["digest"]

    def append_chunk(self, tokens: np.ndarray, sources: np.ndarray, targets: np.ndarray, report: FilterReport) -> None:
        """Add a chunk in the form of `append_flat`."""
        self.append_flat(tokens, sources, targets)
        self._chunks.write(np.array(len(sources), CHUNK_TYPE).tobytes())
        self.chunks, self.report = self.chunks + 1, self.report + report
        if self.chunks % JOURNAL_EVERY == 0:
            self._write_journal()

    def complete(self) -> None:
        """Write the description, and remove what is only needed to continue."""
        self.finish(self.report)
        for name in (JOURNAL, CHUNKS):
            remove(self.folder / name)

    def _write_journal(self) -> None:
        for file in (*self._files, self._chunks):
            file.flush()
            os.fsync(file.fileno())
        counts = {"chunks": self.chunks, "pairs": self.pairs, "tokens": self.tokens}
        journal = {**counts, "report": dataclasses.asdict(self.report), "digest": self._digest.hexdigest()}
        write(self.folder / JOURNAL, json.dumps(journal, indent=1))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        self._chunks.close()


def _read_journal(folder: Path, dtype: str) -> dict[str, Any] | None:
    """What was written, with a digest that can be continued and the length of each file; None if nothing can be used."""
    try:
        journal = read_json(folder / JOURNAL, LARGEST_DESCRIPTION)
        counts = {name: int(journal[name]) for name in ("chunks", "pairs", "tokens")}
        report = {name: int(count) for name, count in journal["report"].items()}
        FilterReport(**report)
        digest = _digest_chunks(folder, dtype, counts)
        if digest is None or digest.hexdigest() != journal["digest"]:
            return None
    except (OSError, InputError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
    sizes = {TOKENS: counts["tokens"] * TOKEN_TYPES[dtype].itemsize, INDEX: counts["pairs"] * INDEX_TYPE.itemsize}
    return {**counts, "report": report, "digest": digest, "bytes": {**sizes, CHUNKS: counts["chunks"] * CHUNK_TYPE.itemsize}}


def _digest_chunks(folder: Path, dtype: str, counts: dict[str, int]) -> Any:
    """The digest as `PairWriter` computes it, chunk by chunk; None if the files are shorter than they should be."""
    pairs_of = np.fromfile(folder / CHUNKS, CHUNK_TYPE, counts["chunks"]).tolist()
    digest, pairs, tokens = hashlib.sha256(), 0, 0
    with open(folder / TOKENS, "rb") as token_file, open(folder / INDEX, "rb") as index_file:
        for count in pairs_of:
            entries = index_file.read(count * INDEX_TYPE.itemsize)
            index = np.frombuffer(entries, INDEX_TYPE)
            length = int(index["source"].sum(dtype=np.int64) + index["target"].sum(dtype=np.int64))
            digest.update(token_file.read(length * TOKEN_TYPES[dtype].itemsize))
            digest.update(entries)
            pairs, tokens = pairs + len(index), tokens + length
    return digest if (len(pairs_of), pairs, tokens) == tuple(counts.values()) else None
