"""Byte-level BPE vocabularies like GPT-2's, through the tokenizers library, which is imported only when needed.

Decoding reproduces any bytes, even invalid UTF-8. GPT-2's pattern splits text into words, and merges split words into pieces;
each byte that is not part of a valid character is a token by itself. Ids: the four special tokens of tokenizer.py, then the
pieces. With GPT-2's own files, each token's id is GPT-2's plus 4, and <|endoftext|> becomes END.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from kilolayer.data.byte_piece_files import BYTE_OF, SPECIAL, BytePieces, parse_byte_pieces, read_byte_pieces
from kilolayer.data.cache_folder import built, content_key
from kilolayer.data.documents import TextPart
from kilolayer.data.piece_trainer import train_pieces
from kilolayer.data.tokenizer import BYTE_BPE_FILE, TokenizerConfig
from kilolayer.errors import OptionError
from kilolayer.files.writing import write

LEAST_FREQUENCY = 2  # minimum count of a pair that becomes a piece
CHARACTERS = 1000  # minimum length of a chunk; the library encodes chunks in parallel
CHUNKS = 1024  # encoded at once: a token takes a hundred bytes of memory until its id is read

# Invalid UTF-8 bytes as Python decodes them with errors="surrogateescape".
BROKEN = "\udc80-\udcff"
# No word of GPT-2's pattern continues from a non-space character into white space, and none looks back, so text can be split
# there without changing its tokens.
LINE_END = re.compile(r"(?<=\S)(?=\n)")


def _chunks(text: str) -> list[str]:
    """Parts that can be encoded independently; invalid UTF-8 bytes are in separate parts."""
    pattern = rf"[{BROKEN}]+|[^{BROKEN}]{{{CHARACTERS}}}[^{BROKEN}]*?[^\s{BROKEN}](?=[ \n])|[^{BROKEN}]+"
    return re.findall(pattern, text)


class BytePieceVocabulary:
    """A byte-level BPE vocabulary; see `TextVocabulary` for its interface."""

    utf8 = False
    exact = True
    ends_between = 2

    def __init__(self, given: BytePieces) -> None:
        library = import_library()
        ids = {piece: token for token, piece in enumerate([*SPECIAL, *given.pieces])}
        self._library = library.Tokenizer(library.models.BPE(vocab=ids, merges=given.merges))
        self._library.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._library.decoder = library.decoders.ByteLevel()
        self._library.add_special_tokens(list(SPECIAL))
        self._library.encode_special_tokens = True  # text that spells a special token is ordinary text
        self._bytes = [*(b"" for _ in SPECIAL), *(bytes(BYTE_OF[letter] for letter in piece) for piece in given.pieces)]
        self._byte_ids = [ids[letter] for letter, _ in sorted(BYTE_OF.items(), key=lambda item: item[1])]
        self.pieces = [*SPECIAL, *given.pieces]
        self.vocab_size = len(ids)
        self.byte_lengths = np.array([len(piece) for piece in self._bytes], np.int64)
        self.digest = hashlib.sha256(json.dumps([given.pieces, given.merges]).encode()).hexdigest()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled vocabulary; the library's pickle forgets this setting."""
        self.__dict__.update(state)
        self._library.encode_special_tokens = True

    @classmethod
    def load(cls, path: Path) -> BytePieceVocabulary:
        """Load from a tokenizer.json, or from a folder with GPT-2's files."""
        import_library()
        return cls(read_byte_pieces(path))

    def encode(self, data: bytes) -> np.ndarray:
        """The token ids of a text, int64 [tokens], without an end token."""
        chunks = _chunks(data.decode("utf-8", "surrogateescape"))
        return np.fromiter(chain.from_iterable(self._ids_of(chunks)), np.int64)

    def _ids_of(self, chunks: list[str]) -> Iterator[list[int]]:
        """The token ids of each chunk."""
        for start in range(0, len(chunks), CHUNKS):
            some = chunks[start : start + CHUNKS]
            broken = ["\udc80" <= chunk[0] <= "\udcff" for chunk in some]
            texts = ["" if apart else chunk for chunk, apart in zip(some, broken, strict=True)]
            found = self._library.encode_batch_fast(texts, add_special_tokens=False)
            for chunk, apart, encoding in zip(some, broken, found, strict=True):
                yield [self._byte_ids[byte] for byte in chunk.encode("utf-8", "surrogateescape")] if apart else encoding.ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids. Special tokens are skipped, and invalid UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes of token ids. Special tokens and ids out of range are skipped."""
        return b"".join(self._bytes[token] for token in ids if 0 <= token < self.vocab_size)

    def text(self) -> str:
        """The text of a tokenizer.json with Kilolayer's ids; the tokenizers library and Hugging Face can read it."""
        return self._library.to_str(pretty=True)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json."""
        write(folder / BYTE_BPE_FILE, self.text().encode())


def byte_pieces_for(text: TextPart, config: TokenizerConfig, cache: Path) -> BytePieceVocabulary:
    """The configured vocabulary, or one trained on `text` and cached. Equal text and settings give equal files."""
    library = import_library()
    if config.path is not None:
        return BytePieceVocabulary.load(Path(config.path))
    settings = ["byte_bpe 1", config.vocab_size, config.sentences, LEAST_FREQUENCY, text.identity, library.__version__]
    folder = cache / f"tokenizer-{content_key(settings, text.files, cache)}"

    def build(draft: Path) -> None:
        every = -(-sum(1 for _ in _lines(text)) // config.sentences)
        lines = (line.encode() for line in islice(_lines(text), 0, None, every or 1))
        options = {"vocab_size": config.size - len(SPECIAL), "min_frequency": LEAST_FREQUENCY}
        given = parse_byte_pieces(train_pieces(lines, options, "tokenizers"), str(draft))
        if config.vocab_size is not None and (size := len(SPECIAL) + len(given.pieces)) < config.vocab_size:
            raise OptionError(
                f"a vocabulary of {config.vocab_size} pieces cannot be made from this text",
                where="tokenizer",
                fix=f"set tokenizer.vocab_size to {size} or less, or give more text",
            )
        BytePieceVocabulary(given).save(draft)

    return BytePieceVocabulary.load(built(folder, build) / BYTE_BPE_FILE)


def import_library(kind: str = "byte_bpe") -> ModuleType:
    """Import the package tokenizers; raises OptionError if it is not installed."""
    try:
        import tokenizers
    except ImportError:
        raise OptionError(
            f'kind = "{kind}" needs the package tokenizers', where="tokenizer", fix="pip install 'kilolayer[bpe]'"
        ) from None
    return tokenizers


def _lines(text: TextPart) -> Iterator[str]:
    """The lines of a text, each with the line feeds before it; invalid UTF-8 is left out."""
    for piece in text.pieces(utf8=False):
        if piece is not None:
            yield from LINE_END.split(piece.decode("utf-8", "ignore"))
