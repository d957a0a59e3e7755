"""Read lines of plain or compressed text files. Only LF ends a line, so that the line counts of two languages agree."""

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
UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
CHUNK = 1 << 20
INSPECTED_BYTES = 400
"""Number of bytes at the start of a text that are checked for UTF-16."""
LONGEST_LINE = 1 << 26
"""Maximum line length in bytes. A single huge line, only a few megabytes when compressed, could fill all memory."""
READERS: dict[str, Callable[[BinaryIO], Any]] = {".gz": lambda raw: gzip.GzipFile(fileobj=raw), ".xz": lzma.LZMAFile}
SUFFIXES = ("", *READERS)


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file (plain, .gz or .xz) without their LF or CR LF.

    A byte order mark at the start is removed. Everything else stays inside its line: U+2028, VT, NUL, a lone CR.
    """
    with open_file(path) as stream:
        for number, line in enumerate(byte_lines(stream, str(path)), 1):
            if number == 1:
                line = line.removeprefix(BOM)
            yield _decode(line.removesuffix(b"\n").removesuffix(b"\r"), path, number)


def byte_lines(stream: BinaryIO, name: str) -> Iterator[bytes]:
    """The lines of a stream, with their ends. A line that is too long, or UTF-16, raises an error that names the stream."""
    for number, line in enumerate(iter(lambda: stream.readline(LONGEST_LINE + 1), b""), 1):
        if number == 1:
            refuse_utf_16(line, name)
        if len(line) > LONGEST_LINE:
            raise InputError(
                f"the line has more than {LONGEST_LINE:,} bytes", where=f"{name}, line {number}", fix="split it into sentences"
            )
        yield line


def count_lines(path: Path) -> int:
    """How many lines `read_lines` yields, without decoding them."""
    lines, last = 0, b"\n"
    with open_file(path) as stream:
        while chunk := stream.read(CHUNK):
            if not lines:
                refuse_utf_16(chunk[:INSPECTED_BYTES], str(path))
            lines, last = lines + chunk.count(b"\n"), chunk[-1:]
    return lines + (last != b"\n")


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file and decompress it; errors, now or while reading, name the file."""
    with open_regular(path) as raw:
        if path.suffix not in READERS:
            yield raw
            return
        try:
            with READERS[path.suffix](raw) as unpacked:
                yield cast("BinaryIO", io.BufferedReader(unpacked, CHUNK))
        except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
            raise InputError(
                f"the file cannot be decompressed: {error}", where=str(path), fix="download or compress it again"
            ) from None


def refuse_utf_16(start: bytes, name: str) -> None:
    """Raise if a text starts like UTF-16: with its byte order mark, or with NUL in nearly every second byte."""
    start = start[:INSPECTED_BYTES]
    kind = "UTF-16" if start.startswith(UTF_16_MARKS) else None
    if kind is None and len(start) >= 8:
        pairs = len(start) // 2
        low, high = start[0 : 2 * pairs : 2].count(0), start[1 : 2 * pairs : 2].count(0)
        kind = "UTF-16LE" if high > 0.7 * pairs and not low else "UTF-16BE" if low > 0.7 * pairs and not high else None
    if kind is not None:
        file = name if name != "standard input" else "FILE"
        raise InputError(
            "the text is UTF-16, but must be UTF-8",
            where=name,
            fix=f"convert it: iconv -f {kind} -t UTF-8 {file} > NEW",
        )


def _decode(line: bytes, path: Path, number: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"not valid UTF-8: byte 0x{line[error.start]:02x}",
            where=f"{path}, line {number}, byte {error.start + 1}",
            fix="save the file as UTF-8; `iconv -f FROM -t UTF-8` converts it",
        ) from None
