"""Text input: from an argument, or line by line from standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

from kilolayer.errors import InputError


class Typed(NamedTuple):
    """A text, and where it came from, for errors."""

    text: str
    where: str


def typed_argument(value: str, where: str) -> Typed:
    """The text of an argument, in which Python has escaped bytes that are not UTF-8."""
    return _checked(value.encode("utf-8", "surrogateescape"), where)


def typed_lines() -> Iterator[Typed]:
    """The lines of standard input, without line ends and without a byte order mark at the start."""
    from kilolayer.data.text import BOM, byte_lines

    for number, line in enumerate(byte_lines(sys.stdin.buffer, "standard input"), 1):
        line = line.removeprefix(BOM) if number == 1 else line
        yield _checked(line.removesuffix(b"\n").removesuffix(b"\r"), f"standard input, line {number}")


def lines_per_answer(most: int) -> int:
    """How many lines to read before answering: 1 on a terminal, so that each line is answered at once."""
    return 1 if sys.stdin.isatty() else most


def _checked(data: bytes, where: str) -> Typed:
    try:
        return Typed(data.decode(), where)
    except UnicodeDecodeError as error:
        raise InputError(
            f"the text is not valid UTF-8: byte 0x{data[error.start]:02x}",
            where=f"{where}, byte {error.start + 1}",
            fix="`iconv -f FROM -t UTF-8` converts it",
        ) from None
