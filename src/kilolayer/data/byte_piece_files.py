"""Read byte-level BPE files: the tokenizers library's tokenizer.json, or GPT-2's vocab.json and merges.txt.

Kilolayer takes from them the merges and the pieces that text can be split into: the 256 bytes and the results of merges, in the
order of their ids. Other entries, such as "<|endoftext|>", are special tokens, which Kilolayer replaces by its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kilolayer.data.tokenizer import BYTE_BPE_FILE
from kilolayer.errors import InputError, shown
from kilolayer.files.paths import kind_of
from kilolayer.files.reading import parse_json, read_json, read_text

VOCABULARY_FILE, MERGES_FILE = "vocab.json", "merges.txt"
SPECIAL = ("<pad>", "<unk>", "<s>", "<|endoftext|>")
"""Padding, unknown, start and end tokens, under their names in tokenizer.json."""
FIX = f"put a {BYTE_BPE_FILE} of GPT-2's form, or GPT-2's {VOCABULARY_FILE} and {MERGES_FILE}, in its place"

# GPT-2 writes each byte as a visible character: printable Latin-1 bytes as themselves, the others from U+0100 on.
_SEEN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_UNSEEN = sorted({*range(256)} - {*_SEEN})
BYTE_OF = {chr(byte): byte for byte in _SEEN} | {chr(256 + index): byte for index, byte in enumerate(_UNSEEN)}
"""The byte that each character of a piece represents."""


@dataclass(frozen=True)
class BytePieces:
    """A byte-level BPE vocabulary as read from its files.

    pieces: in the order of their ids.
    merges: pairs of pieces, highest priority first.
    ids: the id of each piece in the files.
    others: entries that text is never split into, such as special tokens, with their ids.
    """

    pieces: list[str]
    merges: list[tuple[str, str]]
    ids: list[int]
    others: dict[str, int]


def read_byte_pieces(path: Path) -> BytePieces:
    """Read a tokenizer.json, or a folder with a tokenizer.json or with GPT-2's vocab.json and merges.txt."""
    if kind_of(path) != "folder":
        return _of_tokenizer(read_json(path), str(path))
    if kind_of(path / BYTE_BPE_FILE) is not None:
        return _of_tokenizer(read_json(path / BYTE_BPE_FILE), str(path / BYTE_BPE_FILE))
    for name in (VOCABULARY_FILE, MERGES_FILE):
        if kind_of(path / name) is None:
            raise InputError(f"the folder has no {name}, and no {BYTE_BPE_FILE}", where=str(path), fix=FIX)
    lines = read_text(path / MERGES_FILE).split("\n")
    header = lines[0].startswith("#version")
    numbered = [(number, line.rstrip("\r")) for number, line in enumerate(lines, 1) if line.rstrip("\r")]
    merges = [(f"{path / MERGES_FILE}, line {number}", line.split(" ")) for number, line in numbered[header:]]
    return _checked(read_json(path / VOCABULARY_FILE), str(path / VOCABULARY_FILE), merges)


def parse_byte_pieces(text: bytes, where: str) -> BytePieces:
    """Parse the text of a tokenizer.json."""
    return _of_tokenizer(parse_json(text), where)


def _of_tokenizer(table: Any, where: str) -> BytePieces:
    model = table.get("model") if isinstance(table, dict) else None
    if not isinstance(model, dict):
        raise InputError("the file has no model: it is not a tokenizer.json", where=where, fix=FIX)
    for wrong, what in _faults(table, model):
        if wrong:
            raise InputError(what, where=where, fix=FIX)
    # Older files write a merge as one string.
    merges = [each.split(" ") if isinstance(each, str) else each for each in model["merges"]]
    given = _checked(model.get("vocab"), where, [(f"{where}, merge {number}", each) for number, each in enumerate(merges, 1)])
    added = [each for each in table.get("added_tokens") or [] if type(each.get("id")) is int]
    return replace(given, others=given.others | {str(each.get("content")): each["id"] for each in added})


def _faults(table: dict[str, Any], model: dict[str, Any]) -> list[tuple[bool, str]]:
    """Checks as (failed, message): what would split text differently from GPT-2, or would not reproduce it on decoding."""
    kind, splitter, added = model.get("type", "BPE"), table.get("pre_tokenizer"), table.get("added_tokens") or []
    split = splitter if isinstance(splitter, dict) else {}
    affixes = [name for name in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(name)]
    tokens = [each for each in added if isinstance(each, dict)] if isinstance(added, list) else []
    texts = [each.get("content") for each in tokens if not each.get("special")]
    return [
        (not isinstance(added, list) or len(tokens) < len(added), "its added_tokens are not a list of tables"),
        (kind != "BPE", f"its model is {shown(kind)}, not BPE"),
        (table.get("normalizer") is not None, "it normalizes text, which would not come back as it was"),
        (
            split.get("type") != "ByteLevel",
            f"it is not byte-level: its pre_tokenizer is {shown(split.get('type'))}, not ByteLevel",
        ),
        (split.get("use_regex", True) is not True, "it does not cut words as GPT-2 does: its pre_tokenizer has no use_regex"),
        (bool(split.get("add_prefix_space", True)), "it puts a space before text, which would not come back as it was"),
        (bool(affixes), f"it marks the parts of words by {', '.join(affixes)}, which byte-level BPE does not"),
        (bool(model.get("ignore_merges")), "it cuts words into pieces that no merge makes: ignore_merges"),
        (bool(texts), f"it adds tokens for ordinary text, as {shown((texts or [''])[0])}"),
        (not isinstance(model.get("merges"), list), "the model has no merges"),
    ]


def _checked(vocabulary: Any, where: str, merges: Sequence[tuple[str, Any]]) -> BytePieces:
    """The pieces, after checking that every byte and every merge has an id.

    vocabulary: piece to id.
    merges: each with its location in the files, for error messages.
    """
    if not isinstance(vocabulary, dict) or not all(type(token) is int for token in vocabulary.values()):
        raise InputError("the vocabulary does not map pieces to ids", where=where, fix=FIX)
    if len({*vocabulary.values()}) < len(vocabulary):
        raise InputError("two pieces have the same id", where=where, fix=FIX)
    if missing := sorted(byte for letter, byte in BYTE_OF.items() if letter not in vocabulary):
        raise InputError(f"the vocabulary is not byte-level: byte 0x{missing[0]:02x} has no piece", where=where, fix=FIX)
    pairs = [_pair(location, merge) for location, merge in merges]
    made = BYTE_OF.keys() | {first + second for first, second in pairs}
    for (location, _), (first, second) in zip(merges, pairs, strict=True):
        for part in (first, second):
            if part not in made:
                raise InputError(
                    f"the merge needs {shown(part)}, which is not a byte and is not produced by any merge",
                    where=location,
                    fix=FIX,
                )
        if first + second not in vocabulary:
            raise InputError(f"the merge produces {shown(first + second)}, which has no id", where=location, fix=FIX)
        if first + second in SPECIAL:
            raise InputError(f"the merge makes {first + second}, which is a special token", where=location, fix=FIX)
    pieces = sorted(made, key=vocabulary.__getitem__)
    others = {piece: token for piece, token in vocabulary.items() if piece not in made}
    return BytePieces(pieces, pairs, [vocabulary[piece] for piece in pieces], others)


def _pair(where: str, merge: Any) -> tuple[str, str]:
    match merge:
        case [str(first), str(second)] if first and second:
            return first, second
        case _:
            raise InputError("this is not a merge of two pieces", where=where, fix=FIX)
