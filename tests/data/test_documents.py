"""Running text: files, folders, compressed files and JSON lines, whole and in parts."""

from __future__ import annotations

import gzip
import json
import lzma
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kilolayer.config import build
from kilolayer.data import documents
from kilolayer.data.documents import TextConfig, TextPart, find_text
from kilolayer.errors import InputError, OptionError


def documents_of(part: TextPart | None, *, utf8: bool = True) -> list[bytes]:
    """The documents of a part; one that has no end is marked."""
    assert part is not None
    found, now = [], b""
    for piece in part.pieces(utf8=utf8):
        if piece is None:
            found.append(now)
            now = b""
        else:
            assert piece
            now += piece
    return [*found, b"open: " + now] if now else found


def some_text(seed: int, lines: int) -> str:
    dice = random.Random(seed)
    words = ["word", "straße", "日本", "\U0001f600", "x" * 30, " ", "\t", "\u2028", "\u2581"]
    return "\n".join(" ".join(dice.choices(words, k=dice.randrange(12))) for _ in range(lines))


def test_a_file_is_a_document_plain_or_compressed(tmp_path: Path) -> None:
    text = some_text(1, 50).encode()
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "b.gz").write_bytes(gzip.compress(text))
    (tmp_path / "c.txt.xz").write_bytes(lzma.compress(b"\xef\xbb\xbf" + text))
    parts = find_text(TextConfig(train=[str(tmp_path / name) for name in ("c.txt.xz", "a.txt", "b.gz")]), tmp_path / "cache")
    assert documents_of(parts.train) == [text] * 3
    assert (parts.valid, parts.test) == (None, None)


def test_a_folder_holds_documents_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    for name in ("b", "a/z", "a/y.txt", ".hidden", ".git/config", "empty"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("" if name == "empty" else name)
    parts = find_text(build(TextConfig, {"train": str(folder), "valid": [str(folder / "b")]}), tmp_path)
    assert documents_of(parts.train) == [b"a/y.txt", b"a/z", b"b"]
    assert documents_of(parts.valid) == [b"b"]


def test_each_line_of_json_is_a_document(tmp_path: Path) -> None:
    texts = ["one\ntwo", "", "straße \U0001f600", "half \ud83d of a character"]
    lines = [json.dumps({"title": "t", "text": text}) for text in texts]
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress("\n\n".join(lines).encode()))
    (tmp_path / "a.json").write_text("{not read as lines}")
    found = documents_of(TextPart((tmp_path / "a.jsonl.xz", tmp_path / "a.json")))
    whole = ["one\ntwo", "straße \U0001f600", "half \ufffd of a character", "{not read as lines}"]
    assert found == [text.encode() for text in whole]


@pytest.mark.parametrize("line", ["[1, 2]", '{"title": "no text"}', '{"text": 5}', "{", "null"])
def test_a_line_that_is_no_document_is_told(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(InputError, match='"text"') as caught:
        documents_of(TextPart((tmp_path / "a.jsonl",)))
    assert caught.value.where.endswith("a.jsonl, line 2")


@pytest.mark.parametrize("chunk", [4, 7, 16, 1024, 1 << 20])
@pytest.mark.parametrize("kind", ["lines", "one line", "no spaces"])
def test_pieces_end_where_text_may_be_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, kind: str) -> None:
    text = some_text(2, 40)
    text = text if kind == "lines" else text.replace("\n", " ") if kind == "one line" else "".join(text.split())
    (tmp_path / "a").write_text(text, newline="")
    monkeypatch.setattr(documents, "CHUNK", chunk)
    pieces = [piece for piece in TextPart((tmp_path / "a",)).pieces(utf8=True) if piece is not None]
    assert b"".join(pieces).decode() == text
    for piece in pieces:
        piece.decode()
    if chunk == 1024:
        cuts = [(a[-1:], b[:1]) for a, b in pairwise(pieces)]
        allowed = {"lines": lambda a, b: a == b"\n", "one line": lambda a, b: b == b" ", "no spaces": lambda a, b: True}
        assert cuts
        assert all(allowed[kind](*cut) for cut in cuts)


@pytest.mark.parametrize(("valid", "test"), [(0.05, 0.05), (0.3, 0.0), (0.0, 0.25), (0.123, 0.456)])
def test_held_out_shares_are_the_end_of_the_text(tmp_path: Path, valid: float, test: float) -> None:
    whole = [some_text(seed, 30).encode() for seed in range(4)]
    for number, text in enumerate(whole):
        (tmp_path / f"{number}.txt").write_bytes(text)
    config = TextConfig(train=[str(tmp_path)], valid_share=valid, test_share=test)
    parts = find_text(config, tmp_path.parent / "cache")
    pieces = {name: documents_of(getattr(parts, name)) for name in ("train", "valid", "test") if getattr(parts, name)}
    assert pieces.keys() == {"train", *(["valid"] if valid else []), *(["test"] if test else [])}
    together = b"".join(b"".join(found) for found in pieces.values())
    assert together.replace(b"open: ", b"") == b"".join(whole)
    total = sum(map(len, whole))
    for name, share in (("valid", valid), ("test", test)):
        size = sum(len(text.removeprefix(b"open: ")) for text in pieces.get(name, []))
        assert abs(size - total * share) < 5
    for found in pieces.values():
        for text in found:
            text.decode()  # no character is cut
    last = list(pieces.values())[-1]
    assert not last[-1].startswith(b"open: ")  # the last document ends; one that is cut does not
    assert pieces["train"][-1].startswith(b"open: ")


def test_a_usual_split_is_exact(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(97, 117)) * 50)
    parts = find_text(TextConfig(train=[str(tmp_path / "a")], valid_share=0.05, test_share=0.05), tmp_path / "cache")
    assert (parts.train.stop, parts.valid) == (900, TextPart((tmp_path / "a",), 900, 950))
    assert parts.test == TextPart((tmp_path / "a",), 950)


def test_text_that_is_not_utf8_is_told_unless_it_is_read_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbf" + b"fine\n" * 3 + b"caf\xe9 au lait\n")
    with pytest.raises(InputError, match="0xe9") as caught:
        documents_of(TextPart((tmp_path / "a",)))
    assert caught.value.where.endswith("a, byte 22")
    assert documents_of(TextPart((tmp_path / "a",)), utf8=False) == [b"fine\n" * 3 + b"caf\xe9 au lait\n"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_running_text_in_utf_16_is_refused(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a").write_bytes(("plain words\n" * 50).encode(encoding))
    with pytest.raises(InputError, match="the text is UTF-16"):
        documents_of(TextPart((tmp_path / "a",)))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({}, "no training text is given"),
        ({"train": "absent"}, "does not exist"),
        ({"train": "empty"}, "is empty"),
        ({"train": "nothing"}, "no files"),
        ({"train": "full", "valid": "absent"}, "does not exist"),
        ({"train": "full", "valid": "full", "valid_share": 0.1}, "both given"),
        ({"train": "full", "valid_share": 0.5, "test_share": 0.5}, "leave nothing"),
        ({"train": "full", "test_share": 1.0}, "test_share is 1.0"),
        ({"train": "full", "length": 0}, "length is 0"),
        ({"train": "full", "length": 8, "stride": 9}, "stride is 9"),
        ({"train": [5]}, "train is"),
        ({"train": 5}, "train is 5"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], what: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    (tmp_path / "nothing").mkdir()
    (tmp_path / "full").write_text("text")
    with pytest.raises((InputError, OptionError), match=what) as caught:
        find_text(build(TextConfig, options, "text"), tmp_path / "cache")
    assert caught.value.where
    assert caught.value.fix


def test_text_that_is_not_utf8_loses_no_byte(tmp_path: Path) -> None:
    """In code page 866 letters are bytes that continue a character in UTF-8."""
    for index in range(3):
        (tmp_path / f"{index}.txt").write_bytes("Привет, мир\n".encode("cp866"))
    noise = random.Random(1).randbytes(2_500_000)
    (tmp_path / "noise.bin").write_bytes(noise)
    whole = find_text(TextConfig(train=[str(tmp_path)]), tmp_path / "cache").train
    assert documents_of(whole, utf8=False) == ["Привет, мир\n".encode("cp866")] * 3 + [noise]
    shared = find_text(TextConfig(train=[str(tmp_path)], valid_share=0.3, test_share=0.2), tmp_path / "cache")
    found = [piece for part in (shared.train, shared.valid, shared.test) for piece in documents_of(part, utf8=False)]
    assert b"".join(each.removeprefix(b"open: ") for each in found) == b"".join(documents_of(whole, utf8=False))


def test_none_unsets_a_list_of_paths() -> None:
    assert build(TextConfig, {"train": "a.txt", "test": "none"}) == TextConfig(train=["a.txt"])
