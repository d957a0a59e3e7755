"""BERT's WordPiece vocabularies, through the tokenizers library, which is imported only when needed.

Text is normalized as the file specifies (to lower case, for example) and split at spaces and punctuation, and each word into
the longest pieces in the vocabulary. Decoding may not restore case and spaces. Ids: [PAD] 0, [UNK] 1, [CLS] 2 as the start,
[SEP] 3 as the end, then all other pieces in the order of their ids in the file; [MASK] follows the last one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from kilolayer.data.byte_pieces import import_library
from kilolayer.data.tokenizer import BYTE_BPE_FILE, END, START
from kilolayer.errors import InputError, shown
from kilolayer.files.paths import kind_of
from kilolayer.files.reading import read_json, read_text
from kilolayer.files.writing import write

FIRST, MASK = ("[PAD]", "[UNK]", "[CLS]", "[SEP]"), "[MASK]"
WORDS_FILE, OPTIONS_FILE = "vocab.txt", "tokenizer_config.json"
FIX = f"put BERT's {BYTE_BPE_FILE}, or its {WORDS_FILE}, in its place"
# Text can be cut at line ends: no piece crosses one.
SPLITTERS = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")
# Of any number of these, text becomes longer by a small factor at most.
NORMALIZERS = ("BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Strip", "StripAccents")
LONGEST_PREFIX, LONGEST_WORD = 100, 1000  # in characters; a word's time grows with their product, and its own square
LINES = 4096  # encoded at once: a token takes a hundred bytes of memory until its id is read


@dataclass(frozen=True)
class WordPieces:
    """table: a tokenizer.json with Kilolayer's ids, [MASK] last. ids: the ids in the file, in Kilolayer's order."""

    table: dict[str, Any]
    ids: list[int]


def read_word_pieces(path: Path) -> WordPieces:
    """Read a tokenizer.json, or a folder with one or with a vocab.txt."""
    if kind_of(path) != "folder":
        return _renumbered(read_json(path), str(path))
    if kind_of(path / BYTE_BPE_FILE) is not None:
        return _renumbered(read_json(path / BYTE_BPE_FILE), str(path / BYTE_BPE_FILE))
    if kind_of(path / WORDS_FILE) is None:
        raise InputError(f"the folder has no {WORDS_FILE}, and no {BYTE_BPE_FILE}", where=str(path), fix=FIX)
    options = read_json(path / OPTIONS_FILE) if kind_of(path / OPTIONS_FILE) is not None else {}
    words = read_text(path / WORDS_FILE).removesuffix("\n").split("\n")
    vocabulary = {word.rstrip("\r"): token for token, word in enumerate(words)}
    return _renumbered(_table_of(vocabulary, options if isinstance(options, dict) else {}), str(path / WORDS_FILE))


def _table_of(vocabulary: dict[str, int], options: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer.json for a list of words, under the options of Transformers' tokenizer_config.json."""
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": options.get("tokenize_chinese_chars", True),
        "strip_accents": options.get("strip_accents"),
        "lowercase": options.get("do_lower_case", True),
    }
    model = {
        "type": "WordPiece",
        "unk_token": FIRST[1],
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": vocabulary,
    }
    return {"normalizer": normalizer, "pre_tokenizer": {"type": SPLITTERS[0]}, "model": model}


def _renumbered(table: Any, where: str) -> WordPieces:
    model = table.get("model") if isinstance(table, dict) else None
    if not isinstance(model, dict) or model.get("type") != "WordPiece" or not isinstance(model.get("vocab"), dict):
        raise InputError("the file does not hold a WordPiece vocabulary", where=where, fix=FIX)
    kind = _type_of(table.get("pre_tokenizer"))
    if kind not in SPLITTERS:
        raise InputError(f"its pre_tokenizer is {shown(kind)}", where=where, fix=f"supported: {', '.join(SPLITTERS)}")
    for kind in _normalizers(table.get("normalizer")):
        if kind not in NORMALIZERS:
            raise InputError(f"its normalizer is {shown(kind)}", where=where, fix=f"supported: {', '.join(NORMALIZERS)}")
    prefix, unknown = model.get("continuing_subword_prefix", "##"), model.get("unk_token", FIRST[1])
    longest = model.get("max_input_chars_per_word", 100)
    for wrong, what in (
        (unknown != FIRST[1], f"its unk_token is {shown(unknown)}, not {FIRST[1]}"),
        (not isinstance(prefix, str) or len(prefix) > LONGEST_PREFIX, f"its continuing_subword_prefix is {shown(prefix)}"),
        (type(longest) is not int or not 0 < longest <= LONGEST_WORD, f"its max_input_chars_per_word is {shown(longest)}"),
    ):
        if wrong:
            raise InputError(what, where=where, fix=FIX)
    added = table.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(each, dict) for each in added):
        raise InputError("its added_tokens are not a list of tables", where=where, fix=FIX)
    if texts := [each.get("content") for each in added if not each.get("special")]:
        raise InputError(f"it adds tokens for ordinary text, such as {shown(texts[0])}", where=where, fix=FIX)
    known = {**{str(each.get("content")): each.get("id") for each in added}, **model["vocab"]}
    if not all(type(token) is int and token >= 0 for token in known.values()) or len({*known.values()}) < len(known):
        raise InputError("the vocabulary does not map pieces to ids", where=where, fix=FIX)
    if missing := [name for name in (*FIRST, MASK) if name not in known]:
        raise InputError(f"the vocabulary has no {missing[0]}", where=where, fix=FIX)
    rest = sorted(known.keys() - {*FIRST, MASK}, key=known.__getitem__)
    pieces = [*FIRST, *rest, MASK]
    renumbered = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": table.get("normalizer"),
        "pre_tokenizer": table["pre_tokenizer"],
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": prefix, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": unknown,
            "continuing_subword_prefix": prefix,
            "max_input_chars_per_word": longest,
            "vocab": {piece: token for token, piece in enumerate(pieces)},
        },
    }
    return WordPieces(renumbered, [known[piece] for piece in pieces])


def _normalizers(found: Any) -> set[Any]:
    """The types of a normalizer, and of all in a sequence."""
    if found is None:
        return set()
    if _type_of(found) == "Sequence" and isinstance(found.get("normalizers"), list):
        return set().union(*map(_normalizers, found["normalizers"]))
    return {_type_of(found)}


def _type_of(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else None


class WordPieceVocabulary:
    """A WordPiece vocabulary; see `TextVocabulary` for its interface."""

    utf8 = True
    exact = False
    ends_between = 1

    def __init__(self, given: WordPieces, where: str = "") -> None:
        library = import_library("wordpiece")
        try:
            self._library = library.Tokenizer.from_str(json.dumps(given.table))
        except Exception as error:  # the library raises no specific exception class
            raise InputError(f"the tokenizers library cannot read it: {error}", where=where, fix=FIX) from None
        self._library.add_special_tokens([*FIRST, MASK])
        self._library.encode_special_tokens = True  # text that spells a special token is ordinary text
        self._library.post_processor = library.processors.TemplateProcessing(
            single=f"{FIRST[START]} $A {FIRST[END]}",
            pair=f"{FIRST[START]} $A {FIRST[END]} $B:1 {FIRST[END]}:1",
            special_tokens=[(FIRST[START], START), (FIRST[END], END)],
        )
        self.pieces = list(given.table["model"]["vocab"])[:-1]  # without the mask
        self.vocab_size = len(self.pieces)
        ordinary = [piece.removeprefix("##") if token > END else "" for token, piece in enumerate(self.pieces)]
        self.byte_lengths = np.array([len(piece.encode()) for piece in ordinary], np.int64)
        self.digest = hashlib.sha256(self._library.to_str().encode()).hexdigest()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled vocabulary; the library's pickle forgets this setting."""
        self.__dict__.update(state)
        self._library.encode_special_tokens = True

    @classmethod
    def load(cls, path: Path) -> WordPieceVocabulary:
        """Load from a tokenizer.json, or from a folder with one or with a vocab.txt."""
        import_library("wordpiece")
        return cls(read_word_pieces(path), str(path))

    def encode(self, data: bytes) -> np.ndarray:
        """The token ids of a text, int64 [tokens], without an end token."""
        lines = data.decode().split("\n")
        parts = (lines[start : start + LINES] for start in range(0, len(lines), LINES))
        found = chain.from_iterable(self._library.encode_batch_fast(part, add_special_tokens=False) for part in parts)
        return np.fromiter(chain.from_iterable(each.ids for each in found), np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, as the pieces spell it. Special tokens and ids out of range are skipped."""
        return self._library.decode([token for token in map(int, ids) if 0 <= token < self.vocab_size])

    def text(self) -> str:
        """The text of a tokenizer.json with Kilolayer's ids; the tokenizers library and Hugging Face can read it."""
        return self._library.to_str(pretty=True)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json."""
        write(folder / BYTE_BPE_FILE, self.text().encode())
