"""The labelled examples of a run, from the user's own files or GLUE's: which files, columns and classes."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from pathlib import Path
from typing import Literal

from kilolayer.config import bounded, check
from kilolayer.data.cache_folder import built, content_key
from kilolayer.data.documents import TextPart
from kilolayer.data.example_file import ExampleFile, read_example_file
from kilolayer.data.glue import LAYOUTS, Columns, GlueName, Kind, Part, find_glue
from kilolayer.errors import InputError, OptionError, UnusedOptionError, shown
from kilolayer.files.paths import storable

MetricName = Literal["accuracy", "f1", "matthews", "pearson", "spearman"]
METRICS: dict[Kind, tuple[MetricName, ...]] = {"class": ("accuracy", "f1", "matthews"), "number": ("pearson", "spearman")}
MOST_COLUMNS = 10_000
MOST_CLASSES = 10_000
SENTENCES = "sentences.txt"


@dataclass(frozen=True, kw_only=True)
class ExamplesConfig:
    """`[examples]`: the labelled sentences of a classifier, and how they are read."""

    train: str | None = None
    """Training examples: a tab-separated file, or JSON objects, one per line, in a file whose name ends in .jsonl."""
    valid: str | None = None
    """Validation examples, used to choose the best checkpoint."""
    test: str | None = None
    """Test examples, scored once. If they have no labels, the predictions are written to test.predictions.tsv."""
    glue: GlueName | None = None
    """A GLUE task whose files are in `folder`; columns, kind and metrics are then known."""
    folder: str | None = None
    """Folder with GLUE's files: CoLA/train.tsv, as GLUE distributes them, or CoLA.train.tsv; also .gz and .xz."""
    first: str | int = bounded("sentence", least=1, most=MOST_COLUMNS)
    """Column of the sentence: a name from the header line; or a number, counted from 1, for files without a header."""
    second: str | int | None = bounded(None, least=1, most=MOST_COLUMNS)
    """Column of the second sentence. Default: one sentence per example."""
    label: str | int = bounded("label", least=1, most=MOST_COLUMNS)
    """Column of the label."""
    kind: Kind = "class"
    """What a label is: a class, or a number."""
    classes: list[str] = field(default_factory=list)
    """The classes, in order. Default: those that occur in the training examples, sorted."""
    metric: MetricName | None = None
    """Metric by which the best checkpoint is chosen. Default: GLUE's own, else accuracy for classes and pearson for numbers."""
    length: int = bounded(128, least=8, most=2**20)
    """Maximum number of tokens in an example; the longer of two sentences is truncated first."""
    rows: int = bounded(32, least=1, most=2**20)
    """Examples per batch."""

    def __post_init__(self) -> None:
        check(self)
        if self.glue is None:
            self._check_columns()
        else:
            self._check_glue()
        if self.metric is not None and self.metric not in METRICS[self.layout_kind]:
            raise OptionError(
                f"metric {self.metric!r} does not apply to labels of the kind {self.layout_kind!r}",
                fix=f"allowed: {', '.join(METRICS[self.layout_kind])}",
            )
        if self.classes and self.layout_kind == "number":
            raise UnusedOptionError(
                "classes have no effect where labels are numbers", fix="remove them", unused="classes", beside=("kind", "glue")
            )
        if len(set(self.classes)) < len(self.classes) or len(self.classes) == 1:
            raise OptionError(f"classes are {shown(self.classes)}", fix="list at least two, each once")
        for name in self.classes:
            if name != name.strip() or not name or "\t" in name:
                raise OptionError(
                    f"a label cannot be {shown(name)}", fix="use a name without tabs, and without leading or trailing spaces"
                )

    @property
    def layout_kind(self) -> Kind:
        """What a label is, from the GLUE task if one is given, else from `kind`."""
        return self.kind if self.glue is None else LAYOUTS[self.glue].kind

    @property
    def metrics(self) -> tuple[str, ...]:
        """All metrics that are computed; the first chooses the best checkpoint."""
        usual = METRICS[self.kind] if self.kind == "number" else ("accuracy",)
        usual = usual if self.glue is None else LAYOUTS[self.glue].metrics
        return usual if self.metric is None else (self.metric, *(name for name in usual if name != self.metric))

    def columns(self, part: Part) -> Columns:
        """The columns of the files of a part."""
        return Columns(self.first, self.second, self.label) if self.glue is None else LAYOUTS[self.glue].of(part)

    def absolute(self) -> dict[str, str]:
        """The fields that name files, with absolute paths, which a run stores."""
        given = {name: getattr(self, name) for name in ("train", "valid", "test", "folder")}
        return {name: str(storable(Path(path))) for name, path in given.items() if path is not None}

    def _check_columns(self) -> None:
        if self.folder is not None:
            raise UnusedOptionError(
                "folder has no effect without glue",
                fix='remove it, or name the task: glue = "CoLA"',
                unused="folder",
                beside=("glue", "train"),
            )
        columns = [self.first, self.label, *([] if self.second is None else [self.second])]
        if len({type(column) for column in columns}) > 1:
            raise OptionError(
                f"columns are {shown(columns)}", fix="use either names for all of them or numbers for all of them"
            )
        if len(set(columns)) < len(columns):
            raise OptionError(f"columns are {shown(columns)}", fix="first, second and label must be different columns")

    def _check_glue(self) -> None:
        own = ("train", "valid", "test", "first", "second", "label", "kind")
        default = {each.name: each.default for each in fields(self)}
        changed = [name for name in own if getattr(self, name) != default[name]]
        if changed:
            raise UnusedOptionError(
                f"{changed[0]} has no effect: glue = {self.glue!r} sets it",
                fix="remove it",
                unused=changed[0],
                beside=("glue",),
                either=True,
            )


@dataclass(frozen=True)
class ExampleParts:
    """All examples of a run. classes: in order; empty if labels are numbers."""

    train: ExampleFile
    valid: ExampleFile | None
    test: ExampleFile | None
    classes: tuple[str, ...]


def find_examples(config: ExamplesConfig) -> ExampleParts:
    """Read all parts and check every line of them."""
    paths = _paths(config)
    broken = config.glue is not None and LAYOUTS[config.glue].broken
    parts = {
        part: read_example_file(path, config.columns(part), config.layout_kind, unlabelled=part == "test", broken=broken)
        for part, path in paths.items()
    }
    classes = tuple(config.classes)
    if config.layout_kind == "class":
        if not classes:
            _check_first_line(parts["train"], config.columns("train"))
            classes = _classes_of(parts["train"])
        for part in parts.values():
            _check_classes(part, classes)
    else:
        for part in parts.values():
            _check_numbers(part)
    return ExampleParts(parts["train"], parts.get("valid"), parts.get("test"), classes)


def read_test(path: Path, config: ExamplesConfig) -> ExampleFile:
    """Read another file of labelled examples, in the columns of the run's validation set. The run's classes must be known."""
    broken = config.glue is not None and LAYOUTS[config.glue].broken
    part = read_example_file(path, config.columns("valid"), config.layout_kind, unlabelled=False, broken=broken)
    if config.layout_kind == "class":
        _check_classes(part, config.classes)
    else:
        _check_numbers(part)
    return part


def _paths(config: ExamplesConfig) -> dict[Part, Path]:
    if config.glue is not None:
        if config.folder is None:
            raise OptionError(f"the folder with GLUE's {config.glue} is not given", where="examples", fix="set examples.folder")
        return find_glue(config.glue, Path(config.folder))
    if config.train is None:
        raise OptionError(
            "no training examples are given",
            where="examples",
            fix="set examples.train: a .tsv or .jsonl file; or examples.glue",
        )
    given: dict[Part, str | None] = {"train": config.train, "valid": config.valid, "test": config.test}
    return {part: Path(path) for part, path in given.items() if path is not None}


def _check_first_line(part: ExampleFile, columns: Columns) -> None:
    """Raise if columns are given by number but the first line holds their names, which would be read as one more class."""
    counts = Counter(str(example.label) for example in part.examples)
    name = str(part.examples[0].label)
    others = [count for label, count in counts.items() if label != name]
    if isinstance(columns.first, int) and counts[name] == 1 and len(others) > 1 and min(others) > 1:
        raise InputError(
            f"the first line is the only one with the class {shown(name)}, and looks like a header",
            where=f"{part.path}, line {part.examples[0].line}",
            fix="name the columns instead of numbering them; or, if it is an example, list examples.classes",
        )


def _classes_of(part: ExampleFile) -> tuple[str, ...]:
    """The classes that occur in the examples, sorted; integers are sorted by value."""
    names = {str(example.label) for example in part.examples}
    if len(names) < 2:
        raise InputError(
            f"all training examples have the label {shown(names.pop())}",
            where=str(part.path),
            fix="add examples of another class",
        )
    if len(names) > MOST_CLASSES:
        raise InputError(
            f"the training examples have {len(names):,} different labels",
            where=str(part.path),
            fix='to predict numbers, set examples.kind = "number"; otherwise check examples.label',
        )
    if all(name.removeprefix("-").isascii() and name.removeprefix("-").isdigit() for name in names):
        return tuple(sorted(names, key=lambda name: (Decimal(name), name)))  # int() reads at most 4,300 digits
    return tuple(sorted(names))


def _check_classes(part: ExampleFile, classes: Sequence[str]) -> None:
    known = set(classes)
    for example in part.examples:
        if example.label is not None and example.label not in known:
            shortened = [*map(shown, classes[:20]), *(["..."] if len(classes) > 20 else [])]
            raise InputError(
                f"there is no class {shown(example.label)}",
                where=f"{part.path}, line {example.line}",
                fix=f"classes: {', '.join(shortened)}; list others in examples.classes",
            )


def _check_numbers(part: ExampleFile) -> None:
    """Raise if all labels are equal: nothing can be learned, and correlations are undefined."""
    if part.labelled and len({example.label for example in part.examples}) < 2:
        raise InputError(
            f"all examples have the label {part.examples[0].label}",
            where=str(part.path),
            fix="add examples with other labels: a correlation is not defined for a single value",
        )


def text_of(part: ExampleFile, cache: Path) -> TextPart:
    """The sentences of examples as running text, one per line, to train a vocabulary on."""
    sentences = [text for example in part.examples for text in (example.first, example.second) if text]
    digest = hashlib.sha256("\n".join(sentences).encode()).hexdigest()

    def build(draft: Path) -> None:
        (draft / SENTENCES).write_bytes("".join(f"{sentence}\n" for sentence in sentences).encode())

    return TextPart((built(cache / f"sentences-{content_key(['sentences 1', digest])}", build) / SENTENCES,))
