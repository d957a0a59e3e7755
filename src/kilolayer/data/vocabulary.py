"""Vocabularies of models of text: bytes, SentencePiece pieces, or byte-level BPE's, that give every text back as it was.

Since nothing of the text is lost, a token stands for a fixed number of its bytes, and so a loss can be told in bits per byte.
BERT's WordPiece, which loses case and spaces, is there for encoders that were trained with it.
Ids: padding 0, unknown 1, start 2, end 3, as in tokenizer.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Protocol

import numpy as np
import sentencepiece

from kilolayer.data.byte_piece_files import SPECIAL
from kilolayer.data.byte_pieces import BytePieceVocabulary, byte_pieces_for
from kilolayer.data.cache_folder import built, content_key
from kilolayer.data.documents import TextPart
from kilolayer.data.tokenizer import BYTE_BPE_FILE, END, SHARED_FILE, SPACE, Tokenizer, TokenizerConfig, train_tokenizer
from kilolayer.data.word_pieces import WordPieceVocabulary
from kilolayer.errors import InputError, OptionError
from kilolayer.files.paths import kind_of

FIRST_BYTE = END + 1
LONGEST_LINE = 1000  # characters; SentencePiece leaves out lines of more than 4,192 bytes
PROBE = " a  b\n\nc\t\r\n\u00e9 \ufb01 \u00bd\u2028\u65e5 \U0001f600\n"


class TextVocabulary(Protocol):
    """What models of text ask of a vocabulary."""

    vocab_size: int
    utf8: bool
    """Whether text must be UTF-8."""
    exact: bool
    """Whether every text comes back from its ids as it was."""
    ends_between: int
    """END tokens between the two sentences of a pair: RoBERTa's 2, or BERT's 1."""
    byte_lengths: np.ndarray
    """int64 [vocabulary]: the bytes of text that each token stands for."""
    digest: str
    """What tells vocabularies apart."""

    @property
    def pieces(self) -> list[str]:
        """How the vocabulary writes each of its tokens; no two are written alike."""
        ...

    def encode(self, data: bytes) -> np.ndarray:
        """The ids of a text, int64 [tokens], without an end."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; special tokens leave no trace, and bytes that are no UTF-8 become U+FFFD."""
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
        return bytes(token - FIRST_BYTE for token in ids if token >= FIRST_BYTE).decode("utf-8", "replace")

    def save(self, folder: Path) -> None:
        """It needs no file."""


class PieceVocabulary:
    """A SentencePiece model that changes nothing."""

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
        """The vocabulary in a file; fix: what to do where it changes text."""
        return cls(Tokenizer.load(path), str(path), fix)

    @property
    def pieces(self) -> list[str]:
        return self.tokenizer.pieces

    def encode(self, data: bytes) -> np.ndarray:
        # The character that stands for a space would come back as one: it is spelled in bytes.
        parts = [self._encode_plain(text) for text in data.decode().split(SPACE)]
        return np.concatenate([parts[0], *(each for part in parts[1:] for each in (self._space, part))])

    def _encode_plain(self, text: str) -> np.ndarray:
        # Line by line: no piece crosses a line feed, and short texts are encoded side by side.
        *lines, last = text.split("\n")
        ids = self.tokenizer.encode([*(f"{line}\n" for line in lines), last])
        return np.fromiter(chain.from_iterable(ids), np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode([ids])[0]

    def save(self, folder: Path) -> None:
        self.tokenizer.save(folder / SHARED_FILE)


def vocabulary_for(text: TextPart, config: TokenizerConfig, cache: Path) -> TextVocabulary:
    """The vocabulary for some training text: bytes, the given one, or one that is trained on it, once."""
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
    settings = ["exact 1", dataclasses.asdict(config), text.identity, sentencepiece.__version__]

    def build(draft: Path) -> None:
        every = -(-sum(1 for _ in _lines(text)) // config.sentences)

        def train(*more: str) -> bytes:
            lines = chain(islice(_lines(text), 0, None, every or 1), more)
            return train_tokenizer(lines, config, tags=(), exact=True, required=SPACE if more else "")

        model = train()
        # Text without spaces, as in Chinese, gives no piece for them; yet the model may be given some to read. SentencePiece
        # ends the process where a character that is required does not occur at all.
        (draft / SHARED_FILE).write_bytes(model if Tokenizer(model).has_space else train(" "))

    folder = built(cache / f"tokenizer-{content_key(settings, text.files)}", build)
    return PieceVocabulary.load(folder / SHARED_FILE, f"delete {folder}; it will be created again")


def load_vocabulary(folder: Path, config: TokenizerConfig) -> TextVocabulary:
    """The vocabulary that a run keeps in its folder."""
    if config.of_bytes:
        return ByteVocabulary()
    if config.kind == "byte_bpe":
        return BytePieceVocabulary.load(folder / BYTE_BPE_FILE)
    if config.kind == "wordpiece":
        return WordPieceVocabulary.load(folder / BYTE_BPE_FILE)
    return PieceVocabulary.load(folder / SHARED_FILE, "put the run's own vocabulary back in its place")


def _lines(text: TextPart) -> Iterator[str]:
    """The lines that are not empty, long ones in parts."""
    for piece in text.pieces(utf8=True):
        for line in [] if piece is None else piece.decode().split("\n"):
            yield from _parts(line)


def _parts(line: str) -> Sequence[str]:
    """A line in parts that SentencePiece takes, cut before spaces where it has some."""
    places = [0]
    while len(line) - places[-1] > LONGEST_LINE:
        space = line.rfind(" ", places[-1] + 1, places[-1] + LONGEST_LINE)
        places.append(places[-1] + LONGEST_LINE if space < 0 else space)
    return [line[a:b] for a, b in zip(places, [*places[1:], len(line)], strict=True) if a < b]
