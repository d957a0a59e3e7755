"""Token files of running text: one sequence of tokens on disk, from which windows are read on demand.

The sequence is: end, document, end, document, end. So every token but the first has a context to be predicted from. If a part
was cut out of a document, no end token follows it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from kilolayer.data.cache_folder import built, content_key
from kilolayer.data.documents import TextPart
from kilolayer.data.store import LARGEST_DESCRIPTION, TOKEN_TYPES, TOKENS, KeptFile, damaged
from kilolayer.data.tokenizer import END
from kilolayer.data.vocabulary import TextVocabulary
from kilolayer.errors import InputError
from kilolayer.files.paths import kind_of
from kilolayer.files.reading import read_json

DESCRIPTION = "text.json"


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


def encode_documents(text: TextPart, vocabulary: TextVocabulary, cache: Path) -> TokenText:
    """The token file of a text, cached by content."""
    key = content_key(["text 1", vocabulary.digest, text.identity], text.files, cache)
    return TokenText(built(cache / f"text-{key}", lambda draft: _write(text, vocabulary, draft), trust_times=True))


def _write(text: TextPart, vocabulary: TextVocabulary, draft: Path) -> None:
    dtype = "uint16" if vocabulary.vocab_size <= 1 << 16 else "uint32"
    digest = hashlib.sha256()
    counts = {"tokens": 0, "bytes": 0, "documents": 0}
    end = np.array([END])
    with open(draft / TOKENS, "wb") as file:

        def put(tokens: np.ndarray) -> None:
            data = tokens.astype(TOKEN_TYPES[dtype]).tobytes()
            digest.update(data)
            file.write(data)
            counts["tokens"] += len(tokens)

        put(end)
        inside = False
        for piece in text.pieces(utf8=vocabulary.utf8):
            put(end if piece is None else vocabulary.encode(piece))
            counts["bytes"] += len(piece or b"")
            counts["documents"] += piece is not None and not inside
            inside = piece is not None
    if not counts["bytes"]:
        held_out = text.start > 0 or text.stop is not None
        raise InputError(
            "a part of the text is empty" if held_out else "the text is empty",
            where=", ".join(map(str, text.files[:3])),
            fix="give more text, or raise text.valid_share and text.test_share" if held_out else "give files with text",
        )
    description = {**counts, "dtype": dtype, "digest": digest.hexdigest()}
    (draft / DESCRIPTION).write_text(json.dumps(description, indent=1))
