"""Whether each number of a page is one that a derivation gives.

A derivation gives pieces of text with the numbers in them: rows of tables, and words of sentences. Each piece is struck from
its section once. A piece that is not there is a difference between page and files; a number that is left over is one that
nobody derives.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache

WORDS = (
    *("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"),
    *("twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
# Not the digits of names: H200, bf16, GPT-2.
NUMBER = re.compile(rf"(?<![\w.])(?<!GPT-)(?<!SST-)\d(?:[\d,.]*\d)?(?:e-?\d+)?|\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
STRUCK = "#"


def sections_of(page: str) -> dict[str, str]:
    """The sections of a Markdown page by heading, each with its heading, without blocks of code."""
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    parts = re.split(r"^#+ (?=.)", prose, flags=re.MULTILINE)
    return {part.partition("\n")[0]: part for part in parts if part.strip()}


def links_of(section: str) -> set[str]:
    """The targets of a section's links, from the folder of the repository."""
    return {target.removeprefix("../") for target in re.findall(r"\]\(([^)#]+)", section)}


def plain(section: str) -> str:
    """A section as one line, without the targets of links and the names of files."""
    text = re.sub(r"\]\([^)]*\)", "]", section)
    return " ".join(re.sub(r"\[[^\]\s]*\.(?:json|md)\]", "", text).split())


def differences(text: str, pieces: Iterable[str]) -> Iterator[str]:
    """What a plain text and the derived pieces do not have in common; the longest pieces are looked for first."""
    for piece in sorted(pieces, key=len, reverse=True):
        place = _pattern(piece).search(text)
        if place is None:
            yield f"derived, but not on the page: {piece}"
        else:
            text = f"{text[: place.start()]}{STRUCK}{text[place.end() :]}"
    for number in NUMBER.finditer(text):
        around = text[max(0, number.start() - 60) : number.end() + 40]
        yield f"on the page, but not derived: {number[0]} in: {around}"


@cache
def _pattern(piece: str) -> re.Pattern[str]:
    """A piece whose numbers are not parts of longer ones."""
    return re.compile(rf"(?<![\w.,])(?<!\d[-/]){re.escape(piece)}(?!\w|[.,]\d|%)")


def changed(text: str) -> list[tuple[str, str]]:
    """For each number in a plain text: the number, and the text with its last digit, or its word, changed."""
    return [(each[0], f"{text[: each.start()]}{_other(each[0])}{text[each.end() :]}") for each in NUMBER.finditer(text)]


def _other(number: str) -> str:
    if number[-1].isdigit():
        return number[:-1] + str((int(number[-1]) + 1) % 10)
    return WORDS[(WORDS.index(number.lower()) + 1) % len(WORDS)]
