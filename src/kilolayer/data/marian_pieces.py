"""The vocabulary of a Hugging Face Marian model: source.spm and target.spm split text, vocab.json numbers the pieces of both.

If there is a target_vocab.json, each file numbers the pieces of its side; the two can be merged if they never contradict each
other.

In Kilolayer a SentencePiece model numbers its own pieces. So both models are given the pieces of vocab.json, in order, after
padding, unknown, start and end. Pieces that one side lacks are marked as unused, and no text is split into them. Pieces that
are missing from vocab.json, which Marian treats as unknown, are dropped: text is split into others.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kilolayer.errors import InputError
from kilolayer.files.paths import kind_of
from kilolayer.files.reading import read_bytes, read_json

FILES, NUMBERS, TARGET_NUMBERS = ("source.spm", "target.spm"), "vocab.json", "target_vocab.json"
SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
NORMAL, UNKNOWN, CONTROL, UNUSED = 1, 2, 3, 5
"""SentencePiece's numbers for kinds of pieces."""
LONGEST_VARINT = 10
"""Bytes of a number of 64 bits."""
FIX = "put the files of one MarianTokenizer there: source.spm, target.spm and vocab.json"


@dataclass(frozen=True)
class MarianPieces:
    """models: the source and target SentencePiece models with Kilolayer's ids. numbers: the contents of vocab.json.

    pieces: in the order of Kilolayer's ids, the four special tokens first.
    """

    models: tuple[bytes, bytes]
    numbers: dict[str, int]
    pieces: list[str]


def read_marian_pieces(folder: Path) -> MarianPieces:
    """Read source.spm, target.spm and vocab.json from a folder."""
    numbers = _numbers(folder / NUMBERS)
    if kind_of(folder / TARGET_NUMBERS) is not None:
        target = _numbers(folder / TARGET_NUMBERS)
        if any(numbers.get(piece, token) != token for piece, token in target.items()):
            raise InputError(
                "source and target number their pieces differently",
                where=str(folder / TARGET_NUMBERS),
                fix="the model can be imported with kl.from_huggingface, but no run can start from it",
            )
        numbers |= target
    if len({*numbers.values()}) < len(numbers):
        raise InputError("two pieces have the same id", where=str(folder / NUMBERS), fix=FIX)
    for name in ("<unk>", "</s>"):
        if name not in numbers:
            raise InputError(f"the vocabulary has no {name}", where=str(folder / NUMBERS), fix=FIX)
    pieces = [*SPECIAL, *sorted(numbers.keys() - {*SPECIAL}, key=numbers.__getitem__)]
    source, target = (_renumbered(folder / name, pieces) for name in FILES)
    return MarianPieces((source, target), numbers, pieces)


def _numbers(path: Path) -> dict[str, int]:
    found = read_json(path)
    if not isinstance(found, dict) or not all(type(token) is int and token >= 0 for token in found.values()):
        raise InputError("the file does not map pieces to ids", where=str(path), fix=FIX)
    return found


def _renumbered(path: Path, pieces: list[str]) -> bytes:
    """The SentencePiece model of a file, with its pieces replaced by `pieces`, in this order."""
    model = read_bytes(path)
    try:
        fields = list(_fields(model))
        known = dict(_piece(value) for number, value, _ in fields if number == 1)
    except (TypeError, ValueError, IndexError, struct.error):
        raise InputError("not a SentencePiece model", where=str(path), fix=FIX) from None
    kinds: dict[str, int] = dict(zip(SPECIAL, (CONTROL, UNKNOWN, CONTROL, CONTROL), strict=True))
    found = []
    for piece in pieces:
        score, kind = known.get(piece, (0.0, UNUSED))
        found.append(_piece_field(piece, score, kinds.get(piece, kind)))
    return b"".join([*found, *(whole for number, _, whole in fields if number != 1)])


# Protocol buffer messages of SentencePiece's sentencepiece_model.proto. In a model, field 1 is a piece, repeated; in a
# piece, field 1 is the text, 2 the score (fp32) and 3 the kind.


def _fields(data: bytes) -> Iterator[tuple[int, Any, bytes]]:
    """The fields of a message: number, value, and the raw bytes of the whole field."""
    offset = 0
    while offset < len(data):
        start = offset
        key, offset = _varint(data, offset)
        match key & 7:
            case 0:
                value, offset = _varint(data, offset)
            case 1:
                value, offset = data[offset : offset + 8], offset + 8
            case 2:
                size, offset = _varint(data, offset)
                value, offset = data[offset : offset + size], offset + size
            case 5:
                value, offset = data[offset : offset + 4], offset + 4
            case other:
                raise ValueError(f"a field of kind {other}")
        if offset > len(data):
            raise ValueError("cut off")
        yield key >> 3, value, data[start:offset]


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 7 * LONGEST_VARINT, 7):
        byte = data[offset]
        value, offset = value | (byte & 127) << shift, offset + 1
        if byte < 128:
            return value, offset
    raise ValueError("a number that does not end")


def _piece(data: bytes) -> tuple[str, tuple[float, int]]:
    """The text of a piece, its score and its kind."""
    text, score, kind = "", 0.0, NORMAL
    for number, value, _ in _fields(data):
        match number, value:
            case 1, bytes():
                text = value.decode()
            case 2, bytes():
                (score,) = struct.unpack("<f", value)
            case 3, int():
                kind = value
            case 1 | 2 | 3, _:
                raise ValueError(f"field {number} of a piece has another kind")
    return text, (score, kind)


def _piece_field(piece: str, score: float, kind: int) -> bytes:
    text = piece.encode()
    body = b"\x0a" + _as_varint(len(text)) + text + b"\x15" + struct.pack("<f", score) + b"\x18" + _as_varint(kind)
    return b"\x0a" + _as_varint(len(body)) + body


def _as_varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
