"""Read sentence pairs from two line-aligned files, or from a TSV file with two or four columns."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kilolayer.data.cache_folder import built, content_key
from kilolayer.data.text import count_lines, read_lines
from kilolayer.errors import InputError, OptionError, shown
from kilolayer.files.reading import open_regular, read_json
from kilolayer.terminal import counted

LANGUAGE = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
LINES_AT_ONCE = 50_000
Pair = tuple[str, str]


@dataclass(frozen=True, order=True)
class Direction:
    """A translation direction: source and target language."""

    source: str
    target: str

    @classmethod
    def parse(cls, text: Any) -> Direction:
        """Parse a direction such as "en-de"."""
        sides = text.split("-") if isinstance(text, str) else []
        if len(sides) != 2 or not all(LANGUAGE.fullmatch(side) for side in sides) or sides[0] == sides[1]:
            raise OptionError(
                f"{shown(text)} is not a direction",
                fix='write two languages, "en-de"; names consist of letters, digits and _: "pt_BR"',
            )
        return cls(*sides)

    @property
    def name(self) -> str:
        """The form that `parse` reads."""
        return f"{self.source}-{self.target}"

    @property
    def reverse(self) -> Direction:
        """The opposite direction."""
        return Direction(self.target, self.source)


@dataclass(frozen=True)
class ParallelText:
    """Sentence pairs for one direction, from two line-aligned files or one TSV file."""

    files: tuple[Path, ...]
    direction: Direction
    size: int
    """Number of pairs in the files, before any filter."""
    columns: tuple[str, ...] = ()
    """Languages of the columns of a two-column TSV file; empty for four columns or two files."""
    synthetic: bool = False
    upsample: float = 1.0
    set_name: str = ""
    """Name of the test set that it belongs to; empty if there is only one."""

    def pairs(self) -> Iterator[Pair]:
        """(source, target) in the order of the files."""
        if len(self.files) == 2:
            yield from _aligned(*self.files)
        elif self.columns:
            forward = self.columns[0] == self.direction.source
            for first, second in _columns(self.files[0], 2):
                yield (first, second) if forward else (second, first)
        else:
            for one, other, first, second in _columns(self.files[0], 4):
                if (one, other) == (self.direction.source, self.direction.target):
                    yield first, second
                elif (other, one) == (self.direction.source, self.direction.target):
                    yield second, first


def count_filled(path: Path) -> int:
    """The number of lines in a file; raises if there are none."""
    lines = count_lines(path)
    if not lines:
        raise InputError("the file is empty", where=str(path), fix="give a file with one sentence per line")
    return lines


def misaligned(source: Path, lines: int, target: Path, others: int) -> InputError:
    """The error for two files with different numbers of lines."""
    return InputError(
        f"the two sides are not aligned: {counted(lines, 'line')} and {counted(others, 'line')}",
        where=f"{source} and {target}",
        fix="line n of one file must translate line n of the other: find where they diverge",
    )


def _aligned(source: Path, target: Path) -> Iterator[Pair]:
    try:
        yield from zip(read_lines(source), read_lines(target), strict=True)
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise misaligned(source, count_lines(source), target, count_lines(target)) from None


def _columns(path: Path, count: int) -> Iterator[list[str]]:
    for number, line in enumerate(read_lines(path), 1):
        cells = line.split("\t")
        if len(cells) != count:
            kinds = 'two texts with data.columns = ["en", "de"], or language, language, text, text'
            raise InputError(
                f"{counted(len(cells), 'column')}, not {count}", where=f"{path}, line {number}", fix=f"a line has {kinds}"
            )
        yield cells


def pair_name(one: str, other: str) -> str:
    """A name for a language pair, the same for both directions."""
    return "-".join(sorted((one, other)))


def split_columns(path: Path, cache: Path | None) -> dict[str, tuple[Path, int]]:
    """Split a four-column file by language pair: the file and the number of lines of each."""
    if cache is None:
        counts = Counter(pair for pair, _ in _languages(path))
        return {pair: (path, count) for pair, count in counts.items()}
    key = content_key("columns", [path], cache)
    folder = built(cache / f"columns-{key}", lambda draft: _write_split(path, draft), trust_times=True)
    counts = read_json(folder / "counts.json")
    return {pair: (folder / f"{pair}.tsv", count) for pair, count in counts.items()}


def _write_split(path: Path, draft: Path) -> None:
    counts: Counter[str] = Counter()
    waiting: dict[str, list[str]] = {}

    def flush() -> None:
        for pair, lines in waiting.items():
            counts[pair] += len(lines)
            with open(draft / f"{pair}.tsv", "a", encoding="utf-8", newline="") as stream:
                stream.writelines(lines)
        waiting.clear()

    for number, (pair, cells) in enumerate(_languages(path), 1):
        end = "\r\n" if cells[-1].endswith("\r") else "\n"  # reading strips one CR
        waiting.setdefault(pair, []).append("\t".join(cells) + end)
        if number % LINES_AT_ONCE == 0:
            flush()
    flush()
    (draft / "counts.json").write_text(json.dumps(counts))


def _languages(path: Path) -> Iterator[tuple[str, list[str]]]:
    """The language pair of each line, regardless of order, and its cells."""
    with open_regular(path) as file:
        if not file.read(1):
            fix = "give a file with language, language, text, text a line"
            raise InputError("the file is empty", where=str(path), fix=fix)
    for number, cells in enumerate(_columns(path, 4), 1):
        for language in cells[:2]:
            if not LANGUAGE.fullmatch(language):  # it becomes part of a file name
                raise InputError(
                    f"{shown(language)} is not a language",
                    where=f"{path}, line {number}",
                    fix="names consist of letters, digits and _",
                )
        yield pair_name(*cells[:2]), cells


def blank_side(text: ParallelText) -> InputError | None:
    """The error for a text with a side on which every line is empty; None if neither side is."""
    blank = [all(not pair[side].strip() for pair in text.pairs()) for side in (0, 1)]
    if not any(blank):
        return None
    sides = [side for side, is_blank in zip(("source", "target"), blank, strict=True) if is_blank]
    files = [path for path, is_blank in zip(text.files, blank, strict=True) if is_blank] if len(text.files) == 2 else text.files
    return InputError(
        f"every {' and every '.join(sides)} is empty",
        where=" and ".join(map(str, files)),
        fix="fill in the text: one sentence per line",
    )
