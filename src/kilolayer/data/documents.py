"""Running text: its files, its documents, and the parts held out for validation and test.

Each file is a document; in a .jsonl file, each line is one, and its "text" field is used. Files may be plain, .gz or .xz.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from kilolayer.config import bounded, check
from kilolayer.data.cache_folder import built, content_key
from kilolayer.data.shares import check_shares
from kilolayer.data.text import BOM, CHUNK, READERS, open_file, read_lines, refuse_utf_16
from kilolayer.errors import InputError, OptionError, UnusedOptionError
from kilolayer.files.paths import kind_of, storable
from kilolayer.files.reading import open_regular, parse_json, read_json, replace_surrogates, unreadable


def _paths(value: Any) -> Any:
    """Accept a single path without brackets, and "none"."""
    return [] if value == "none" else [value] if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True)
class DocumentsConfig:
    """`[text]`: what a model of running text learns, and how much of it the model reads at once."""

    train: list[str] = field(default_factory=list, metadata={"parse": _paths})
    """Training text: files, or folders, which are read with all their subfolders. Each file, or each line of a .jsonl file, is
    a document."""
    valid: list[str] = field(default_factory=list, metadata={"parse": _paths})
    """Validation text, in the same form as `train`."""
    test: list[str] = field(default_factory=list, metadata={"parse": _paths})
    """Test text, scored once, in the same form as `train`."""
    valid_share: float = bounded(0.0, least=0, below=1)
    """Fraction of the training text, in bytes, that is taken from its end for validation."""
    test_share: float = bounded(0.0, least=0, below=1)
    """Fraction of the training text, in bytes, that is taken from its end for the test; it follows the validation part."""
    length: int = bounded(512, least=1, most=2**24)
    """Context length: tokens per window, the maximum that the model reads at once, in training and afterwards."""

    def __post_init__(self) -> None:
        check(self)
        check_shares(self)


@dataclass(frozen=True, kw_only=True)
class TextConfig(DocumentsConfig):
    """`[text]` of a model that reads from left to right."""

    stride: int | None = bounded(None, least=1, most=2**24)
    """Tokens from the start of one test window to the next: each token has at least length - stride tokens of context. Default:
    length."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stride is not None and self.stride > self.length:
            raise OptionError(f"stride is {self.stride}", fix=f"allowed: 1 to the length of a window, {self.length}")
        if self.stride is not None and not self.test and not self.test_share:
            raise UnusedOptionError(
                "stride has no effect without a test set",
                fix="set test or test_share, or remove it",
                unused="stride",
                beside=("test", "test_share"),
            )


AnyText = TypeVar("AnyText", bound=DocumentsConfig)


@dataclass(frozen=True)
class TextPart:
    """Bytes `start` to `stop` of the concatenated text of `files`; with stop None, to the end."""

    files: tuple[Path, ...]
    start: int = 0
    stop: int | None = None

    @property
    def identity(self) -> list[Any]:
        """What identifies this text besides the contents of its files."""
        return [self.start, self.stop, [[_is_json(path), path.suffix in READERS] for path in self.files]]

    def pieces(self, *, utf8: bool) -> Iterator[bytes | None]:
        """The text in pieces of about a megabyte, with None after the end of each document.

        A piece ends after a line if possible, else before a space, and never inside a character. A part that begins or ends
        inside a document does so at the next character boundary. utf8: raise an error on text that is not valid UTF-8.
        """
        position, inside = 0, False
        for piece in _pieces(self.files, utf8):
            if piece is None:
                if inside:
                    yield None
                inside = False
                continue
            if self.stop is not None and position >= self.stop:
                return
            # Only where a part begins or ends: text that is not UTF-8 has such bytes at the start of a document too.
            low = 0 if position >= self.start else _next_character(piece, self.start - position)
            left = len(piece) if self.stop is None else self.stop - position
            high = len(piece) if left >= len(piece) else _next_character(piece, left)
            position += len(piece)
            inside = low < high == len(piece)  # and not cut off before its end
            if low < high:
                yield piece[low:high]


@dataclass(frozen=True)
class TextParts:
    """All text of a run: its training, validation and test sets."""

    train: TextPart
    valid: TextPart | None
    test: TextPart | None


def absolute(config: AnyText) -> AnyText:
    """The configuration with absolute paths, which a run stores."""
    names = ("train", "valid", "test")
    return replace(config, **{name: [str(storable(Path(path))) for path in getattr(config, name)] for name in names})


def find_text(config: DocumentsConfig, cache: Path) -> TextParts:
    """The text that `config` specifies, after checking that its files are present and not empty."""
    if not config.train:
        raise OptionError("no training text is given", where="text", fix="set text.train: a file, or a folder of files")
    train = text_files(config.train, "text.train")
    held_out = {name: text_files(paths, f"text.{name}") for name in ("valid", "test") if (paths := getattr(config, name))}
    valid, test = (TextPart(held_out[name]) if name in held_out else None for name in ("valid", "test"))
    if not config.valid_share and not config.test_share:
        return TextParts(TextPart(train), valid, test)
    total = _count_bytes(train, cache)
    tail = round(total * config.test_share)
    first, second = total - tail - round(total * config.valid_share), total - tail
    return TextParts(
        TextPart(train, 0, first),
        TextPart(train, first, second) if config.valid_share else valid,
        TextPart(train, second) if config.test_share else test,
    )


def text_files(paths: Sequence[str], where: str) -> tuple[Path, ...]:
    """The files given by `paths`, without repetition; those of a folder in the order of their names, without hidden files."""
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        kind = kind_of(path)
        if kind == "folder":
            below = sorted(_files_below(path))
            if not below:
                raise InputError("the folder has no files", where=f"{where}: {path}", fix="put text files into it")
            found.update(dict.fromkeys(below))
            continue
        if kind is None:
            raise InputError("the file does not exist", where=f"{where}: {path}", fix="check the path")
        with open_regular(path) as file:
            if not file.read(1):
                raise InputError("the file is empty", where=f"{where}: {path}", fix="give a file with text")
        found[path] = None
    return tuple(found)


def _files_below(folder: Path) -> Iterator[Path]:
    """All files in a folder and its subfolders, except hidden ones; raises if a folder cannot be read."""

    def refuse(error: OSError) -> None:
        raise unreadable(error.filename, error)

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = [Path(parent, name) for name in names if not name.startswith(".")]
        yield from (path for path in paths if kind_of(path) == "file")


def _pieces(files: Sequence[Path], utf8: bool) -> Iterator[bytes | None]:
    """All documents of all files, with None after each."""
    for path in files:
        if _is_json(path):
            for document in _json_lines(path):
                yield document
                yield None
        else:
            yield from _plain(path, utf8)
            yield None


def _is_json(path: Path) -> bool:
    return (path.stem if path.suffix in READERS else path.name).endswith(".jsonl")


def _json_lines(path: Path) -> Iterator[bytes]:
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            text = parse_json(line)["text"]
            yield replace_surrogates(text).encode()
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError(
                'not a JSON object with a "text"', where=f"{path}, line {number}", fix='a line is {"text": "..."}'
            ) from None


def _plain(path: Path, utf8: bool) -> Iterator[bytes]:
    """The pieces of one file, without a byte order mark."""
    with open_file(path) as stream:
        rest, position = b"", 0
        while chunk := stream.read(CHUNK):
            if not position and not rest:
                if utf8:
                    refuse_utf_16(chunk, str(path))
                if chunk.startswith(BOM):
                    chunk, position = chunk[len(BOM) :], len(BOM)
            rest += chunk
            if not rest:
                continue
            end = _offset_to_cut(rest)
            yield _checked(rest[:end], path, position) if utf8 else rest[:end]
            rest, position = rest[end:], position + end
        if rest:
            yield _checked(rest, path, position) if utf8 else rest


def _offset_to_cut(data: bytes) -> int:
    """Where to cut: after the last line; if there is none, before the last space or at the last character boundary."""
    if line := data.rfind(b"\n") + 1:
        return line
    if (space := data.rfind(b" ")) > 0:
        return space
    last = max(len(data) - 1, 0)
    while last > max(len(data) - 4, 0) and data[last] & 0xC0 == 0x80:
        last -= 1
    width = 1 if data[last] < 0xC0 else 2 if data[last] < 0xE0 else 3 if data[last] < 0xF0 else 4
    return last if last and last + width > len(data) else len(data)


def _next_character(data: bytes, offset: int) -> int:
    """`offset`, or the start of the next character if it is inside one."""
    offset = min(offset, len(data))
    inside = next((n for n in range(3) if offset + n >= len(data) or data[offset + n] & 0xC0 != 0x80), 3)
    return offset + inside


def _checked(piece: bytes, path: Path, position: int) -> bytes:
    try:
        piece.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"not valid UTF-8: byte 0x{piece[error.start]:02x}",
            where=f"{path}, byte {position + error.start + 1:,}",
            fix='save the file as UTF-8 (`iconv -f FROM -t UTF-8`), or set tokenizer.kind = "bytes" or "byte_bpe"',
        ) from None
    return piece


def _count_bytes(files: tuple[Path, ...], cache: Path) -> int:
    """The number of bytes of all documents; cached, because counting a compressed file is slow."""

    def count(draft: Path) -> None:
        total = sum(len(piece) for piece in TextPart(files).pieces(utf8=False) if piece is not None)
        (draft / "bytes.json").write_text(json.dumps(total))

    folder = built(cache / f"bytes-{content_key(['bytes 1', TextPart(files).identity], files, cache)}", count)
    return read_json(folder / "bytes.json", 1 << 10)
