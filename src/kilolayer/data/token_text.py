"""Token files of running text: one sequence of tokens on disk, from which windows are read on demand.

The sequence is: end, document, end, document, end. So every token but the first has a context to be predicted from. If a part
was cut out of a document, no end token follows it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kilolayer.data.cache_folder import built, content_key
from kilolayer.data.documents import TextPart
from kilolayer.data.encoding_processes import available_processes, encode_chunks
from kilolayer.data.preparation_progress import PreparationProgress
from kilolayer.data.resumable_text import ResumableTextWriter
from kilolayer.data.store import LARGEST_DESCRIPTION, TOKEN_TYPES, TOKENS, KeptFile, damaged, token_type
from kilolayer.data.tokenizer import END
from kilolayer.data.vocabulary import TextVocabulary
from kilolayer.errors import InputError
from kilolayer.files.paths import kind_of
from kilolayer.files.reading import read_json

DESCRIPTION = "text.json"
CHUNK_BYTES = 1 << 20
SEVERAL_PROCESSES = 32 << 20
"""Bytes from which on several processes encode a text: fewer take about as long as the start of a process."""


class TokenText:
    """The token file of a text in a folder. Tokens are read from disk and not held in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            description = read_json(folder / DESCRIPTION, LARGEST_DESCRIPTION)
            self.tokens, self.bytes, self.documents = (int(description[name]) for name in ("tokens", "bytes", "documents"))
            self.digest = str(description["digest"])  # identifies the tokens, wherever the folder is
            self._type = TOKEN_TYPES[description["dtype"]]
        except (ValueError, KeyError, TypeError, OverflowError):
            raise damaged(folder, DESCRIPTION) from None
        if kind_of(folder / TOKENS) != "file":
            raise damaged(folder, TOKENS)
        self._file = KeptFile(folder / TOKENS)
        if self._file.size != self.tokens * self._type.itemsize:
            raise damaged(folder, TOKENS)

    def __len__(self) -> int:
        return self.tokens

    def __str__(self) -> str:
        documents = "document" if self.documents == 1 else "documents"
        return f"{self.bytes:,} bytes in {self.documents:,} {documents}, {self.tokens:,} tokens"

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """`length` tokens from each of the offsets `starts`, int [n]: int64 [n, length]."""
        return self.read_spans(starts, np.full(len(starts), length)).reshape(len(starts), length)

    def read_spans(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The concatenated spans of `lengths`, int [n], tokens from the offsets `starts`, int [n]: int64 [sum of lengths]."""
        spans = np.stack([starts, lengths], axis=1) * self._type.itemsize
        return np.frombuffer(self._file.read_spans(spans.tolist()), self._type).astype(np.int64)


def encode_documents(text: TextPart, vocabulary: TextVocabulary, cache: Path, processes: int | None = None) -> TokenText:
    """The token file of a text, cached by content.

    processes: how many encode the text; default: one for each core if the text is large. The file does not depend on it, nor on
    whether a process was killed while it wrote it: the next one continues.
    """
    key = content_key(["text 2", vocabulary.digest, text.identity], text.files, cache)
    count = processes or (1 if _file_bytes(text) < SEVERAL_PROCESSES else available_processes())

    def build(draft: Path) -> None:
        _write(text, vocabulary, draft, count)

    return TokenText(built(cache / f"text-{key}", build, trust_times=True, resumable=True))


class TextChunk(NamedTuple):
    """Pieces of text with None after each document, their bytes, and the number of documents that begin in them."""

    pieces: list[bytes | None]
    bytes: int
    documents: int


@dataclass(frozen=True)
class TextEncoder:
    """Encodes chunks: the tokens of each piece, and an end token after each document."""

    vocabulary: TextVocabulary

    def __call__(self, chunk: TextChunk) -> tuple[np.ndarray, int, int]:
        """Tokens, uint32 [n], and the chunk's bytes and documents."""
        end = np.array([END])
        tokens = [end if piece is None else self.vocabulary.encode(piece) for piece in chunk.pieces]
        return np.concatenate(tokens).astype(np.uint32), chunk.bytes, chunk.documents


def _write(text: TextPart, vocabulary: TextVocabulary, draft: Path, processes: int) -> None:
    dtype = token_type(vocabulary.vocab_size)
    with ResumableTextWriter(draft, dtype) as writer:
        progress = PreparationProgress(text.files[0].name, _file_bytes(text), writer.counts["bytes"], "byte")
        left = islice(_chunks(text.pieces(utf8=vocabulary.utf8)), writer.counts["chunks"], None)
        try:
            for encoded in encode_chunks(TextEncoder(vocabulary), left, processes):
                writer.append(*encoded)
                progress.show(writer.counts["bytes"])
        finally:
            progress.end()
        writer.complete()
        counts = {name: writer.counts[name] for name in ("tokens", "bytes", "documents")}
    if not counts["bytes"]:
        held_out = text.start > 0 or text.stop is not None
        raise InputError(
            "a part of the text is empty" if held_out else "the text is empty",
            where=", ".join(map(str, text.files[:3])),
            fix="give more text, or raise text.valid_share and text.test_share" if held_out else "give files with text",
        )
    description = {**counts, "dtype": dtype, "digest": writer.digest.hexdigest()}
    (draft / DESCRIPTION).write_text(json.dumps(description, indent=1))


def _chunks(pieces: Iterator[bytes | None]) -> Iterator[TextChunk]:
    """Group pieces into chunks of at least CHUNK_BYTES; the first begins with the end of a document that is not there."""
    some: list[bytes | None] = [None]
    size = documents = 0
    inside = False
    for piece in pieces:
        some.append(piece)
        size += len(piece or b"")
        documents += piece is not None and not inside
        inside = piece is not None
        if size >= CHUNK_BYTES:
            yield TextChunk(some, size, documents)
            some, size, documents = [], 0, 0
    if some:
        yield TextChunk(some, size, documents)


def _file_bytes(text: TextPart) -> int:
    """The size of the text, estimated by that of its files."""
    total = sum(path.stat().st_size for path in text.files)
    return (total if text.stop is None else text.stop) - text.start
