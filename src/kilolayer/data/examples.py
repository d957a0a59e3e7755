"""Labelled examples: one or two sentences and a class or a number, from TSV files, JSON lines or GLUE's own files.

A TSV file has no quotes: a field is what stands between two tabs. Files may be plain, .gz or .xz.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from kilolayer.config import bounded, check
from kilolayer.data.cache_folder import built, content_key
from kilolayer.data.documents import TextPart
from kilolayer.data.glue import LAYOUTS, Columns, GlueName, Kind, Part, find_glue
from kilolayer.data.text import READERS, read_lines
from kilolayer.errors import InputError, OptionError, nearest, shown
from kilolayer.files.paths import storable
from kilolayer.files.reading import parse_json

MetricName = Literal["accuracy", "f1", "matthews", "pearson", "spearman"]
METRICS: dict[Kind, tuple[MetricName, ...]] = {"class": ("accuracy", "f1", "matthews"), "number": ("pearson", "spearman")}
MOST_COLUMNS = 10_000
MOST_CLASSES = 10_000
SENTENCES = "sentences.txt"
Fields = Mapping[str | int, Any]
"""What a line holds, by the names or the numbers of the columns."""


@dataclass(frozen=True, kw_only=True)
class ExamplesConfig:
    """`[examples]`: the labelled sentences of a classifier, and how they are read."""

    train: str | None = None
    """Training examples: a file of tab-separated columns, or one of JSON objects whose name ends in .jsonl."""
    valid: str | None = None
    """Examples to choose the best checkpoint by."""
    test: str | None = None
    """Examples to be scored on, once. Without labels: the predictions are written, to test.predictions.tsv."""
    glue: GlueName | None = None
    """A task of GLUE, whose files `folder` holds; columns, kind and metrics are then known."""
    folder: str | None = None
    """Where GLUE's files are: CoLA/train.tsv as GLUE has them, or CoLA.train.tsv; .gz and .xz too."""
    first: str | int = bounded("sentence", least=1, most=MOST_COLUMNS)
    """The column of the sentence: a name in the first line; or a number, from 1 on, in files that have no such line."""
    second: str | int | None = bounded(None, least=1, most=MOST_COLUMNS)
    """The column of a second sentence; absent: there is one sentence a line."""
    label: str | int = bounded("label", least=1, most=MOST_COLUMNS)
    """The column of the label."""
    kind: Kind = "class"
    """What a label is: one of some classes, or a number."""
    classes: list[str] = field(default_factory=list)
    """The classes in their order. Absent: those of the training examples, sorted."""
    metric: MetricName | None = None
    """What the best checkpoint is chosen by. Absent: as GLUE has it, else accuracy, of numbers pearson."""
    length: int = bounded(128, least=8, most=2**20)
    """The most tokens of an example; the longer of two sentences is cut first."""
    rows: int = bounded(32, least=1, most=2**20)
    """Examples of a batch."""

    def __post_init__(self) -> None:
        check(self)
        if self.glue is None:
            self._check_columns()
        else:
            self._check_glue()
        if self.metric is not None and self.metric not in METRICS[self.layout_kind]:
            raise OptionError(
                f"metric {self.metric!r} is not for labels of the kind {self.layout_kind!r}",
                fix=f"allowed: {', '.join(METRICS[self.layout_kind])}",
            )
        if self.classes and self.layout_kind == "number":
            raise OptionError("classes have no effect where labels are numbers", fix="remove them")
        if len(set(self.classes)) < len(self.classes) or len(self.classes) == 1:
            raise OptionError(f"classes are {shown(self.classes)}", fix="name at least two, each once")

    @property
    def layout_kind(self) -> Kind:
        """What a label is, whoever says so."""
        return self.kind if self.glue is None else LAYOUTS[self.glue].kind

    @property
    def metrics(self) -> tuple[str, ...]:
        """All that are measured, the one to choose by first."""
        usual = METRICS[self.kind] if self.kind == "number" else ("accuracy",)
        usual = usual if self.glue is None else LAYOUTS[self.glue].metrics
        return usual if self.metric is None else (self.metric, *(name for name in usual if name != self.metric))

    def columns(self, part: Part) -> Columns:
        """Where the files of a part have what."""
        return Columns(self.first, self.second, self.label) if self.glue is None else LAYOUTS[self.glue].of(part)

    def absolute(self) -> dict[str, str]:
        """The fields that name files, as a run keeps them."""
        given = {name: getattr(self, name) for name in ("train", "valid", "test", "folder")}
        return {name: str(storable(Path(path))) for name, path in given.items() if path is not None}

    def _check_columns(self) -> None:
        if self.folder is not None:
            raise OptionError("folder has no effect without glue", fix='remove it, or name the task: glue = "CoLA"')
        columns = [self.first, self.label, *([] if self.second is None else [self.second])]
        if len({type(column) for column in columns}) > 1:
            raise OptionError(f"columns are {shown(columns)}", fix="give all of them names, or all of them numbers")
        if len(set(columns)) < len(columns):
            raise OptionError(f"columns are {shown(columns)}", fix="first, second and label must be different columns")

    def _check_glue(self) -> None:
        own = ("train", "valid", "test", "first", "second", "label", "kind")
        default = {each.name: each.default for each in fields(self)}
        changed = [name for name in own if getattr(self, name) != default[name]]
        if changed:
            raise OptionError(f"{changed[0]} has no effect: glue = {self.glue!r} says it", fix="remove it")


@dataclass(frozen=True)
class Example:
    """What a line of a file holds. label: a class by its name, a number, or None where the file has no labels."""

    first: str
    second: str | None
    label: str | float | None
    line: int
    """From 1 on."""


@dataclass(frozen=True)
class ExampleFile:
    """The examples of a file, in its order."""

    path: Path
    examples: list[Example]

    @property
    def labelled(self) -> bool:
        """Whether it has labels."""
        return self.examples[0].label is not None

    def __len__(self) -> int:
        return len(self.examples)


@dataclass(frozen=True)
class ExampleParts:
    """All examples of a run. classes: in their order; empty where labels are numbers."""

    train: ExampleFile
    valid: ExampleFile | None
    test: ExampleFile | None
    classes: tuple[str, ...]


def find_examples(config: ExamplesConfig) -> ExampleParts:
    """Read all parts and check every line of them."""
    paths = _paths(config)
    parts = {part: _read(path, config, part) for part, path in paths.items()}
    classes = tuple(config.classes)
    if config.layout_kind == "class":
        classes = classes or _classes_of(parts["train"])
        for part in parts.values():
            _check_classes(part, classes)
    return ExampleParts(parts["train"], parts.get("valid"), parts.get("test"), classes)


def _paths(config: ExamplesConfig) -> dict[Part, Path]:
    if config.glue is not None:
        if config.folder is None:
            raise OptionError(f"where GLUE's {config.glue} is, is not said", where="examples", fix="set examples.folder")
        return find_glue(config.glue, Path(config.folder))
    if config.train is None:
        raise OptionError(
            "no examples are named", where="examples", fix="set examples.train: a .tsv or .jsonl file; or examples.glue"
        )
    given: dict[Part, str | None] = {"train": config.train, "valid": config.valid, "test": config.test}
    return {part: Path(path) for part, path in given.items() if path is not None}


def _read(path: Path, config: ExamplesConfig, part: Part) -> ExampleFile:
    columns = config.columns(part)
    broken = config.glue is not None and LAYOUTS[config.glue].broken
    label_of = _class_name if config.layout_kind == "class" else _number
    examples: list[Example] = []
    labelled: bool | None = None
    for line, found in _lines(path, columns, skip_broken=broken):
        where = f"{path}, line {line}"
        if labelled is None:  # by the first line; GLUE's test parts have no labels
            labelled = part != "test" or columns.label in found
        first = _sentence(found, columns.first, where, empty=broken)
        second = None if columns.second is None else _sentence(found, columns.second, where, empty=broken)
        label = _label(found, columns.label, where, label_of) if labelled else None
        examples.append(Example(first, second, label, line))
    if not examples:
        raise InputError("the file has no examples", where=str(path), fix="give at least one")
    return ExampleFile(path, examples)


def _lines(path: Path, columns: Columns, *, skip_broken: bool) -> Iterator[tuple[int, Fields]]:
    """The lines of a file with their numbers and what they hold."""
    name = path.stem if path.suffix in READERS else path.name
    if name.endswith(".jsonl"):
        yield from _objects(path, columns)
        return
    lines = enumerate(read_lines(path), 1)
    names: Sequence[str | int] | None = None
    if isinstance(columns.first, str):
        number, header = next(lines, (1, ""))
        names = header.split("\t")
        if len(names) == 1 and columns.first not in names:
            raise InputError(
                f"the first line names no columns: {shown(header)}" if header else "the first line is empty",
                where=f"{path}, line {number}",
                fix="write the names of the columns there, parted by one tab each, without quotes; a file without names: "
                "set examples.first, second and label to numbers",
            )
        _check_header(names, columns, f"{path}, line {number}")
    for number, line in lines:
        values = line.split("\t")
        keys = names if names is not None else range(1, len(values) + 1)
        if len(values) == len(keys):
            yield number, dict(zip(keys, values, strict=True))
        elif not skip_broken:
            raise InputError(
                f"the line has {len(values)} columns, and the first line names {len(keys)}",
                where=f"{path}, line {number}",
                fix="columns are parted by one tab each, without quotes: mend the line",
            )


def _objects(path: Path, columns: Columns) -> Iterator[tuple[int, Fields]]:
    if isinstance(columns.first, int):
        raise OptionError(
            f"column {columns.first} is a number, and {path.name} holds JSON objects",
            where="examples",
            fix="name what they have: first, second and label",
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
        raise InputError(f"two columns have the name {shown(twice[0])}", where=where, fix="rename one of them")


def _missing(column: str | int, there: Sequence[str | int], where: str) -> InputError:
    names = [name for name in there if isinstance(name, str)]
    if isinstance(column, str) and names:
        return InputError(
            f"there is no column {shown(column)}; is it {shown(nearest(column, names))}?",
            where=where,
            fix=f"columns here: {', '.join(map(shown, names))}; set examples.first, second and label",
        )
    return InputError(
        f"there is no column {shown(column)} here, but {len(there)}", where=where, fix="set examples.first, second and label"
    )


def _sentence(found: Fields, column: str | int, where: str, *, empty: bool) -> str:
    if column not in found:
        raise _missing(column, list(found), where)
    text = found[column]
    if not isinstance(text, str):
        raise InputError(f"{shown(column)} is {shown(text)}, not a text", where=where, fix="write the sentence in quotes")
    # JSON may spell half a character, which UTF-8 cannot.
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").strip()
    if not text and not empty:
        raise InputError(f"the sentence in column {shown(column)} is empty", where=where, fix="fill it in, or remove the line")
    return text


def _label(found: Fields, column: str | int, where: str, read: Callable[[Any], str | float | None]) -> str | float:
    if column not in found:
        raise _missing(column, list(found), where)
    label = read(found[column])
    if label is None:
        kind = "a class" if read is _class_name else "a number"
        raise InputError(f"the label is {shown(found[column])}, not {kind}", where=where, fix="mend it, or remove the line")
    return label


def _class_name(value: Any) -> str | None:
    """The name of a class, which JSON may also write as a number or a truth value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return (value.strip() or None) if isinstance(value, str) and "\t" not in value else None


def _number(value: Any) -> float | None:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (ValueError, TypeError, OverflowError):
        return None
    return number if math.isfinite(number) and abs(number) <= 1e30 else None


def _classes_of(part: ExampleFile) -> tuple[str, ...]:
    """The classes of some examples, sorted: whole numbers by their value."""
    names = {str(example.label) for example in part.examples}
    if len(names) < 2:
        raise InputError(
            f"all training examples have the label {shown(names.pop())}", where=str(part.path), fix="give some of another class"
        )
    if len(names) > MOST_CLASSES:
        raise InputError(
            f"the training examples have {len(names):,} different labels",
            where=str(part.path),
            fix='numbers are learned with examples.kind = "number"; else check examples.label',
        )
    if all(name.removeprefix("-").isascii() and name.removeprefix("-").isdigit() for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def _check_classes(part: ExampleFile, classes: Sequence[str]) -> None:
    known = set(classes)
    for example in part.examples:
        if example.label is not None and example.label not in known:
            shortened = [*map(shown, classes[:20]), *(["..."] if len(classes) > 20 else [])]
            raise InputError(
                f"no class has the name {shown(example.label)}",
                where=f"{part.path}, line {example.line}",
                fix=f"classes: {', '.join(shortened)}; name others in examples.classes",
            )


def text_of(part: ExampleFile, cache: Path) -> TextPart:
    """The sentences of some examples as running text, a line each: what a vocabulary can be trained on."""
    sentences = [text for example in part.examples for text in (example.first, example.second) if text]
    digest = hashlib.sha256("\n".join(sentences).encode()).hexdigest()

    def build(draft: Path) -> None:
        (draft / SENTENCES).write_bytes("".join(f"{sentence}\n" for sentence in sentences).encode())

    return TextPart((built(cache / f"sentences-{content_key(['sentences 1', digest])}", build) / SENTENCES,))
