"""The file layouts of the GLUE tasks (Wang et al. 2018), by task name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kilolayer.data.text import SUFFIXES
from kilolayer.errors import InputError
from kilolayer.files.paths import kind_of

GlueName = Literal["CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "MNLI-mm", "QNLI", "RTE", "WNLI"]
Kind = Literal["class", "number"]
Part = Literal["train", "valid", "test"]
Column = str | int


@dataclass(frozen=True)
class Columns:
    """Where a file has its sentences and labels: column names from its header or, in a file without one, numbers from 1."""

    first: Column
    second: Column | None
    label: Column


@dataclass(frozen=True)
class Layout:
    """The file layout of one task. metrics: those that GLUE reports; the first chooses the best checkpoint."""

    columns: Columns
    metrics: tuple[str, ...] = ("accuracy",)
    kind: Kind = "class"
    test: Columns | None = None
    """Columns of the test set, if they differ."""
    files: Mapping[Part, str] = field(default_factory=lambda: {"train": "train", "valid": "dev", "test": "test"})
    title: str = ""
    """The name in file names, if it differs from the task's."""
    broken: bool = False
    """Whether some rows lack columns (these are skipped) and some questions are empty."""

    def of(self, part: Part) -> Columns:
        """The columns of a part."""
        return self.test if part == "test" and self.test is not None else self.columns


PAIRS = Columns("sentence1", "sentence2", "label")
MATCHED: dict[Part, str] = {"train": "train", "valid": "dev_matched", "test": "test_matched"}
MISMATCHED: dict[Part, str] = {"train": "train", "valid": "dev_mismatched", "test": "test_mismatched"}
NATURAL = Columns("sentence1", "sentence2", "gold_label")

LAYOUTS: dict[GlueName, Layout] = {
    "CoLA": Layout(Columns(4, None, 2), ("matthews",), test=Columns("sentence", None, "label")),
    "SST-2": Layout(Columns("sentence", None, "label")),
    "MRPC": Layout(Columns("#1 String", "#2 String", "Quality"), ("accuracy", "f1")),
    "STS-B": Layout(Columns("sentence1", "sentence2", "score"), ("pearson", "spearman"), kind="number"),
    "QQP": Layout(Columns("question1", "question2", "is_duplicate"), ("accuracy", "f1"), broken=True),
    "MNLI": Layout(NATURAL, files=MATCHED),
    "MNLI-mm": Layout(NATURAL, files=MISMATCHED, title="MNLI"),
    "QNLI": Layout(Columns("question", "sentence", "label")),
    "RTE": Layout(PAIRS),
    "WNLI": Layout(PAIRS),
}


def find_glue(name: GlueName, folder: Path) -> dict[Part, Path]:
    """The files of a task: FOLDER/CoLA/train.tsv as GLUE distributes them, FOLDER/train.tsv, or FOLDER/CoLA.train.tsv; also
    .gz, .xz.

    The training and validation sets must exist; the test set may be absent.
    """
    layout = LAYOUTS[name]
    title = layout.title or name
    missing: Part = "train"
    for pattern in ("{title}/{stem}.tsv", "{title}.{stem}.tsv", "{stem}.tsv"):
        found: dict[Part, Path] = {}
        for part, stem in layout.files.items():
            stem_path = pattern.format(title=title, stem=stem)
            paths = (folder / f"{stem_path}{suffix}" for suffix in SUFFIXES)
            if path := next((path for path in paths if kind_of(path) == "file"), None):
                found[part] = path
        if "train" in found and "valid" in found:
            return found
        missing = "valid" if "train" in found else missing
    stem = layout.files[missing]
    raise InputError(
        f"GLUE's {name} has no {stem} part here",
        where=str(folder),
        fix=f"put {title}/{stem}.tsv there, or {title}.{stem}.tsv, plain, .gz or .xz",
    )
