"""Text that is typed: as an argument, or line by line on standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

from kilolayer.errors import InputError


class Typed(NamedTuple):
    """A text, and where it was typed."""

    text: str
    where: str


def typed_argument(value: str, where: str) -> Typed:
    """The text of an argument, which Python hands over with its odd bytes escaped."""
    return _checked(value.encode("utf-8", "surrogateescape"), where)


def typed_lines() -> Iterator[Typed]:
    """The lines of standard input, without their ends; nor with a byte order mark at its start, as in files."""
    from kilolayer.data.text import BOM, byte_lines

    for number, line in enumerate(byte_lines(sys.stdin.buffer, "standard input"), 1):
        line = line.removeprefix(BOM) if number == 1 else line
        yield _checked(line.removesuffix(b"\n").removesuffix(b"\r"), f"standard input, line {number}")


def at_once(most: int) -> int:
    """How many lines are read before they are answered: whoever types them is answered after each."""
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
