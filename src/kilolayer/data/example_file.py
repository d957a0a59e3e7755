"""Read a file of labelled examples, as TSV or JSON lines: each line has one or two sentences and a class or a number.

TSV files have no quoting: a field is whatever is between two tabs. Files may be plain, .gz or .xz.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kilolayer.data.glue import Columns, Kind
from kilolayer.data.text import READERS, read_lines
from kilolayer.errors import InputError, OptionError, nearest, shown
from kilolayer.files.reading import parse_json, replace_surrogates
from kilolayer.terminal import counted

LARGEST_NUMBER = 1e15
"""Largest absolute value of a label: the squared errors of a batch can then be summed in fp32."""
Fields = Mapping[str | int, Any]
"""The values of a line, by column name or number."""


@dataclass(frozen=True)
class Example:
    """One example. label: the name of a class, a number, or None if the file has no labels."""

    first: str
    second: str | None
    label: str | float | None
    line: int
    """Line number, from 1."""


@dataclass(frozen=True)
class ExampleFile:
    """The examples of a file, in order."""

    path: Path
    examples: list[Example]

    @property
    def labelled(self) -> bool:
        """Whether the examples have labels."""
        return self.examples[0].label is not None

    def __len__(self) -> int:
        return len(self.examples)


def read_example_file(path: Path, columns: Columns, kind: Kind, *, unlabelled: bool, broken: bool) -> ExampleFile:
    """Read the examples of a file and check every line.

    unlabelled: allow a file without labels, which is decided by its first line.
    broken: skip lines that lack columns, and accept empty sentences.
    """
    label_of = _class_name if kind == "class" else _number
    examples: list[Example] = []
    labelled: bool | None = None
    for line, found in _lines(path, columns, skip_broken=broken):
        where = f"{path}, line {line}"
        if labelled is None:
            labelled = not unlabelled or columns.label in found
        elif not labelled and columns.label in found:
            raise InputError(
                f"the line has a {shown(str(columns.label))}, but the first line has none",
                where=where,
                fix="label every example, or none",
            )
        first = _sentence(found, columns.first, where, empty=broken)
        second = None if columns.second is None else _sentence(found, columns.second, where, empty=broken)
        label = _label(found, columns.label, where, label_of) if labelled else None
        examples.append(Example(first, second, label, line))
    if not examples:
        raise InputError("the file has no examples", where=str(path), fix="give at least one")
    return ExampleFile(path, examples)


def _lines(path: Path, columns: Columns, *, skip_broken: bool) -> Iterator[tuple[int, Fields]]:
    """The lines of a file: their numbers and values."""
    name = path.stem if path.suffix in READERS else path.name
    if name.endswith(".jsonl"):
        yield from _objects(path, columns)
        return
    lines = enumerate(read_lines(path), 1)
    names: Sequence[str | int] | None = None
    verb = "names"
    if isinstance(columns.first, str):
        number, header = next(lines, (1, ""))
        names = header.split("\t")
        if len(names) == 1 and columns.first not in names:
            raise InputError(
                f"the first line does not name the columns: {shown(header)}" if header else "the first line is empty",
                where=f"{path}, line {number}",
                fix="write the column names there, separated by single tabs, without quotes; for a file without a header, "
                "set examples.first, second and label to numbers",
            )
        _check_header(names, columns, f"{path}, line {number}")
    for number, line in lines:
        values = line.split("\t")
        if names is None:
            names, verb = range(1, len(values) + 1), "has"
        if len(values) == len(names):
            yield number, dict(zip(names, values, strict=True))
        elif not skip_broken:
            raise InputError(
                f"the line has {counted(len(values), 'column')}, and the first line {verb} {len(names)}",
                where=f"{path}, line {number}",
                fix="columns are separated by single tabs, without quotes: correct the line",
            )


def _objects(path: Path, columns: Columns) -> Iterator[tuple[int, Fields]]:
    if isinstance(columns.first, int):
        raise OptionError(
            f"column {columns.first} is a number, but {path.name} holds JSON objects",
            where="examples",
            fix="set examples.first, second and label to their keys",
        )
    for number, line in enumerate(read_lines(path), 1):
        try:
            found = parse_json(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise InputError(
                "not a JSON object", where=f"{path}, line {number}", fix='a line is {"sentence": ..., "label": ...}'
            )
        yield number, found


def _check_header(names: Sequence[str], columns: Columns, where: str) -> None:
    wanted = [column for column in (columns.first, columns.second) if isinstance(column, str)]
    for column in wanted:
        if column not in names:
            raise _missing(column, names, where)
    twice = [column for column in (*wanted, columns.label) if names.count(str(column)) > 1]
    if twice:
        raise InputError(f"two columns are called {shown(twice[0])}", where=where, fix="rename one of them")


def _missing(column: str | int, there: Sequence[str | int], where: str) -> InputError:
    names = [name for name in there if isinstance(name, str)]
    if isinstance(column, str) and names:
        near = nearest(column, names)
        return InputError(
            f"there is no column {shown(column)}{f'; is it {shown(near)}?' if near else ''}",
            where=where,
            fix=f"columns here: {', '.join(map(shown, names))}; set examples.first, second and label, "
            "to numbers if these are not names",
        )
    return InputError(
        f"there is no column {shown(column)}: the file has {counted(len(there), 'column')}",
        where=where,
        fix="set examples.first, second and label",
    )


def _sentence(found: Fields, column: str | int, where: str, *, empty: bool) -> str:
    if column not in found:
        raise _missing(column, list(found), where)
    text = found[column]
    if not isinstance(text, str):
        raise InputError(f"{shown(column)} is {shown(text)}, not a text", where=where, fix="write the sentence in quotes")
    text = replace_surrogates(text).strip()
    if not text and not empty:
        raise InputError(f"the sentence in column {shown(column)} is empty", where=where, fix="fill it in, or remove the line")
    return text


def _label(found: Fields, column: str | int, where: str, read: Callable[[Any], str | float | None]) -> str | float:
    if column not in found:
        raise _missing(column, list(found), where)
    label = read(found[column])
    if label is None:
        kind, bound = ("a class", "") if read is _class_name else ("a number", f"; the largest is {LARGEST_NUMBER:g}")
        fix = f"correct it, or remove the line{bound}"
        raise InputError(f"the label is {shown(found[column])}, not {kind}", where=where, fix=fix)
    return label


def _class_name(value: Any) -> str | None:
    """The name of a class, which JSON may also give as a number or a boolean; None if the value is not a name."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return (value.strip() or None) if isinstance(value, str) and "\t" not in value else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or (isinstance(value, str) and "_" in value):  # float() would read 1_5 as 15
        return None
    try:
        number = float(value)
    except (ValueError, TypeError, OverflowError):
        return None
    return number if math.isfinite(number) and abs(number) <= LARGEST_NUMBER else None
