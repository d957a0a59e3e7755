"""Lines of text files, plain or compressed. A line ends at LF and nowhere else, so that line counts of two languages agree."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from kilolayer.errors import InputError
from kilolayer.files.reading import open_regular

BOM = b"\xef\xbb\xbf"
CHUNK = 1 << 20
LONGEST_LINE = 1 << 26
"""Bytes; a file of one endless line, a few megabytes when compressed, would fill all memory."""
READERS: dict[str, Callable[[BinaryIO], Any]] = {".gz": lambda raw: gzip.GzipFile(fileobj=raw), ".xz": lzma.LZMAFile}
SUFFIXES = ("", *READERS)


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file (plain, .gz, .xz) without their end: LF, or CR LF.

    A byte order mark at the start is removed. Everything else stays inside its line: U+2028, VT, NUL, a lone CR.
    """
    with open_file(path) as stream:
        for number, line in enumerate(byte_lines(stream, str(path)), 1):
            if number == 1:
                line = line.removeprefix(BOM)
            yield _decode(line.removesuffix(b"\n").removesuffix(b"\r"), path, number)


def byte_lines(stream: BinaryIO, name: str) -> Iterator[bytes]:
    """The lines of a stream, with their ends; one that is too long raises with the stream's name and its number."""
    for number, line in enumerate(iter(lambda: stream.readline(LONGEST_LINE + 1), b""), 1):
        if len(line) > LONGEST_LINE:
            raise InputError(
                f"the line has more than {LONGEST_LINE:,} bytes", where=f"{name}, line {number}", fix="break it into sentences"
            )
        yield line


def count_lines(path: Path) -> int:
    """How many lines `read_lines` gives, without decoding them."""
    lines, last = 0, b"\n"
    with open_file(path) as stream:
        while chunk := stream.read(CHUNK):
            lines, last = lines + chunk.count(b"\n"), chunk[-1:]
    return lines + (last != b"\n")


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """The decompressed bytes of a file; what cannot be read raises with the file's name, at the opening or later."""
    with open_regular(path) as raw:
        if path.suffix not in READERS:
            yield raw
            return
        try:
            with READERS[path.suffix](raw) as unpacked:
                yield cast("BinaryIO", io.BufferedReader(unpacked, CHUNK))
        except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
            raise InputError(
                f"the file cannot be decompressed: {error}", where=str(path), fix="fetch or compress it again"
            ) from None


def _decode(line: bytes, path: Path, number: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"not valid UTF-8: byte 0x{line[error.start]:02x}",
            where=f"{path}, line {number}, byte {error.start + 1}",
            fix="save the file as UTF-8; `iconv -f FROM -t UTF-8` converts it",
        ) from None
