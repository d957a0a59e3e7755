"""Vocabularies for language models: bytes, SentencePiece or byte-level BPE, all of which reproduce any text on decoding.

Because encoding is lossless, each token represents a fixed number of bytes, and a loss can be reported in bits per byte. BERT's
WordPiece, which loses case and spaces, is supported for encoders that were trained with it. Ids: padding 0, unknown 1, start 2,
end 3, as in tokenizer.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Protocol

import numpy as np
import sentencepiece

from kilolayer.data.byte_piece_files import SPECIAL
from kilolayer.data.byte_pieces import BytePieceVocabulary, byte_pieces_for
from kilolayer.data.cache_folder import built, content_key
from kilolayer.data.documents import TextPart
from kilolayer.data.tokenizer import (
    BYTE_BPE_FILE,
    END,
    SHARED_FILE,
    SPACE,
    Tokenizer,
    TokenizerConfig,
    short_parts,
    train_fitting,
    train_tokenizer,
)
from kilolayer.data.word_pieces import WordPieceVocabulary
from kilolayer.errors import InputError, OptionError
from kilolayer.files.paths import kind_of

FIRST_BYTE = END + 1
PROBE = " a  b\n\nc\t\r\n\u00e9 \ufb01 \u00bd\u2028\u65e5 \U0001f600\n"


class TextVocabulary(Protocol):
    """The interface of a vocabulary for running text."""

    vocab_size: int
    utf8: bool
    """Whether text must be UTF-8."""
    exact: bool
    """Whether decoding reproduces every text exactly."""
    ends_between: int
    """Number of END tokens between the two sentences of a pair: 2 as in RoBERTa, or 1 as in BERT."""
    byte_lengths: np.ndarray
    """int64 [vocabulary]: the number of bytes of text that each token represents."""
    digest: str
    """A digest that identifies the vocabulary."""

    @property
    def pieces(self) -> list[str]:
        """The written form of each token; no two are equal."""
        ...

    def encode(self, data: bytes) -> np.ndarray:
        """The token ids of a text, int64 [tokens], without an end token."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids. Special tokens are skipped, and invalid UTF-8 becomes U+FFFD."""
        ...

    def save(self, folder: Path) -> None:
        """Write the vocabulary's file, if it has one."""
        ...


class ByteVocabulary:
    """Each byte is a token."""

    vocab_size = FIRST_BYTE + 256
    utf8 = False
    exact = True
    ends_between = 2
    byte_lengths = np.repeat([0, 1], [FIRST_BYTE, 256])
    digest = hashlib.sha256(b"bytes").hexdigest()

    @property
    def pieces(self) -> list[str]:
        return [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]

    def encode(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, np.uint8).astype(np.int64) + FIRST_BYTE

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(token - FIRST_BYTE for token in ids if FIRST_BYTE <= token < self.vocab_size).decode("utf-8", "replace")

    def save(self, folder: Path) -> None:
        """Do nothing: a byte vocabulary needs no file."""


class PieceVocabulary:
    """A SentencePiece model without normalization."""

    utf8 = True
    exact = True
    ends_between = 2

    def __init__(self, tokenizer: Tokenizer, where: str, fix: str) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.byte_lengths = np.array(tokenizer.byte_lengths(), np.int64)
        self.digest = hashlib.sha256(tokenizer.model).hexdigest()
        self._space = np.array([tokenizer.byte_id(byte) for byte in SPACE.encode()], np.int64)
        ids = self.encode(PROBE.encode())
        if self.decode(ids.tolist()) != PROBE or self.byte_lengths[ids].sum() != len(PROBE.encode()):
            raise InputError("decoding with this vocabulary does not restore the text exactly", where=where, fix=fix)

    @classmethod
    def load(cls, path: Path, fix: str) -> PieceVocabulary:
        """Load a model file. fix: the advice in the error if the model changes text."""
        return cls(Tokenizer.load(path), str(path), fix)

    @property
    def pieces(self) -> list[str]:
        return self.tokenizer.pieces

    def encode(self, data: bytes) -> np.ndarray:
        # SentencePiece's character for a space would be decoded as a space, so it is encoded as bytes.
        parts = [self._encode_plain(text) for text in data.decode().split(SPACE)]
        return np.concatenate([parts[0], *(each for part in parts[1:] for each in (self._space, part))])

    def _encode_plain(self, text: str) -> np.ndarray:
        # Line by line: no piece crosses a line feed, and short texts are encoded in parallel.
        *lines, last = text.split("\n")
        ids = self.tokenizer.encode([*(f"{line}\n" for line in lines), last])
        return np.fromiter(chain.from_iterable(ids), np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode([ids])[0]

    def save(self, folder: Path) -> None:
        self.tokenizer.save(folder / SHARED_FILE)


def vocabulary_for(text: TextPart, config: TokenizerConfig, cache: Path) -> TextVocabulary:
    """The vocabulary for training text: bytes, the configured one, or one trained on the text and cached."""
    if config.of_bytes:
        return ByteVocabulary()
    if config.kind == "byte_bpe":
        return byte_pieces_for(text, config, cache)
    if config.kind == "wordpiece":
        assert config.path is not None
        return WordPieceVocabulary.load(Path(config.path))
    if config.path is not None:
        if Path(config.path).suffix == ".json" or kind_of(Path(config.path)) == "folder":
            raise OptionError(
                f"{config.path} is not a SentencePiece model", where="tokenizer.path", fix='set kind = "byte_bpe"'
            )
        options = "--normalization_rule_name=identity --remove_extra_whitespaces=false --add_dummy_prefix=false"
        fix = f"train it with {options} --byte_fallback, or let it be trained here: remove tokenizer.path"
        return PieceVocabulary.load(Path(config.path), fix)
    settings = ["exact 2", dataclasses.asdict(config), text.identity, sentencepiece.__version__]

    def build(draft: Path) -> None:
        every = -(-sum(1 for _ in _lines(text)) // config.sentences)

        def train(*more: str) -> bytes:
            def with_size(fitting: TokenizerConfig) -> bytes:
                lines = chain(islice(_lines(text), 0, None, every or 1), more)
                return train_tokenizer(lines, fitting, tags=(), exact=True, required=SPACE if more else "")

            return train_fitting(with_size, config)

        model = train()
        # Text without spaces, such as Chinese, gives no piece for a space, but the model may be given spaces to read.
        # SentencePiece
        # ends the process if a required character does not occur at all.
        (draft / SHARED_FILE).write_bytes(model if Tokenizer(model).has_space else train(" "))

    folder = built(cache / f"tokenizer-{content_key(settings, text.files, cache)}", build)
    return PieceVocabulary.load(folder / SHARED_FILE, f"delete {folder}; it will be created again")


def load_vocabulary(folder: Path, config: TokenizerConfig) -> TextVocabulary:
    """The vocabulary stored in a run's folder."""
    if config.of_bytes:
        return ByteVocabulary()
    if config.kind == "byte_bpe":
        return BytePieceVocabulary.load(folder / BYTE_BPE_FILE)
    if config.kind == "wordpiece":
        return WordPieceVocabulary.load(folder / BYTE_BPE_FILE)
    return PieceVocabulary.load(folder / SHARED_FILE, "put the run's own vocabulary back in its place")


def _lines(text: TextPart) -> Iterator[str]:
    """The lines that are not empty; long ones are split."""
    for piece in text.pieces(utf8=True):
        for line in [] if piece is None else piece.decode().split("\n"):
            yield from short_parts(line)
