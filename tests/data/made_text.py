"""Token files whose every token is another one, so that a token tells where it stood."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from kilolayer.data.token_text import TokenText

END = 3


def made_text(folder: Path, lengths: Iterable[int], *, ended: bool = True) -> tuple[TokenText, list[list[int]]]:
    """A text of documents of these lengths, and the tokens of each; ended: the last one has an end behind it."""
    folder.mkdir(parents=True)
    documents, next_token = [], 10
    for length in lengths:
        documents.append(list(range(next_token, next_token + length)))
        next_token += length
    line = [END, *(token for document in documents for token in (*document, END))]
    data = np.array(line if ended else line[:-1], "<u4").tobytes()
    (folder / "tokens.bin").write_bytes(data)
    counts = {"tokens": len(data) // 4, "bytes": next_token - 10, "documents": len(documents)}
    description = {**counts, "dtype": "uint32", "digest": hashlib.sha256(data).hexdigest()}
    (folder / "text.json").write_text(json.dumps(description))
    return TokenText(folder), documents
