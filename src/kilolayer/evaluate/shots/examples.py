"""Read the files of a question set: the questions to answer, and those that serve as solved examples."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kilolayer import hints
from kilolayer.data.text import SUFFIXES, read_lines
from kilolayer.errors import InputError, OptionError
from kilolayer.evaluate.shots.registry import Question, QuestionSet
from kilolayer.evaluate.shots.row import Row
from kilolayer.files.paths import kind_of

PARTS = ("val", "test", "")
"""The questions are read from the first of these parts that exists: NAME.val.jsonl, NAME.test.jsonl, NAME.jsonl."""
TRAIN = "train"
WHOLE = "all"
"""The name of the file without a part in signatures."""
BETWEEN = "\n\n"
"""Separator after each example."""


@dataclass(frozen=True)
class Part:
    """The questions of a file. digest: a digest of its lines."""

    name: str
    questions: list[Question]
    digest: str


@dataclass(frozen=True)
class Examples:
    """The questions of a set, and those from which its examples are drawn: NAME.train.jsonl if it exists, else the same."""

    set: QuestionSet
    asked: Part
    solved: Part

    def check(self, shots: int, limit: int | None = None) -> None:
        """Raise if there are not enough examples for `shots` shots on each of the first `limit` questions."""
        alike = Counter(question.contexts for question in self.solved.questions)
        most = max(alike[question.contexts] for question in self.asked.questions[:limit])
        if shots > len(self.solved.questions) - most:
            what = f"{self.set.name} has {len(self.solved.questions) - most} examples besides the question, fewer than {shots}"
            raise OptionError(what, where=hints.argument("shots"), fix="ask for fewer shots, or give a larger file of examples")

    def prompt(self, number: int, shots: int, seed: int) -> Question:
        """A question preceded by `shots` solved ones, which depend only on seed, set and number.

        No example has the same contexts as the question, which excludes the question itself and its twin in a Winograd schema.
        """
        question, draws = self.asked.questions[number], random.Random(f"{seed}/{self.set.name}/{number}")
        chosen: dict[int, Question] = {}
        while len(chosen) < shots:
            # Only random() gives the same numbers in all versions of Python.
            index = int(draws.random() * len(self.solved.questions))
            if self.solved.questions[index].contexts != question.contexts:
                chosen.setdefault(index, self.solved.questions[index])
        before = "".join(example.solved + BETWEEN for example in chosen.values())
        contexts = tuple(before + context for context in question.contexts)
        return Question(contexts, question.continuations, question.answer, question.prior)

    def signature(self, shots: int, seed: int, limit: int | None = None) -> str:
        """What a result depends on besides the model and the norm."""
        drawn = f"|from:{self.solved.name}|seed:{seed}" if shots else ""
        digest = self.asked.digest if not shots or self.solved is self.asked else f"{self.asked.digest}+{self.solved.digest}"
        some = "" if limit is None or limit >= len(self.asked.questions) else f"|first:{limit}"
        return f"task:{self.set.name}|part:{self.asked.name}|data:{digest}{some}|shots:{shots}{drawn}"


def read_examples(questions: QuestionSet, folder: Path) -> Examples:
    """Read the files of a set in a folder, and check every line."""
    if kind_of(folder) != "folder":
        raise InputError("the folder of questions does not exist", where=str(folder), fix=f"check {hints.argument('examples')}")
    paths = {part: path for part in (*PARTS, TRAIN) if (path := _find(folder, questions.name, part)) is not None}
    first = next((part for part in PARTS if part in paths), None)
    if first is None:
        name, columns = questions.name, ", ".join(questions.columns)
        raise InputError(
            f"there are no questions for {name}",
            where=str(folder),
            fix=f"put {name}.val.jsonl there (plain, .gz or .xz), lines of JSON with {columns}; see docs/few-shot.md",
        )
    asked = _read(paths[first], first or WHOLE, questions)
    return Examples(questions, asked, _read(paths[TRAIN], TRAIN, questions) if TRAIN in paths else asked)


def _find(folder: Path, name: str, part: str) -> Path | None:
    """The file of a part; None if it does not exist."""
    stem = f"{name}.{part}.jsonl" if part else f"{name}.jsonl"
    return next((path for suffix in SUFFIXES if kind_of(path := folder / f"{stem}{suffix}") is not None), None)


def _read(path: Path, name: str, questions: QuestionSet) -> Part:
    found, digest = [], hashlib.sha256()
    for number, line in enumerate(read_lines(path), 1):
        digest.update(f"{line}\n".encode())
        row = Row.parse(line, f"{path}, line {number}", questions.columns)
        question = questions.read(row)
        if not all(map(str.strip, question.continuations)):
            raise row.error("an answer is empty: it has no likelihood")
        found.append(question)
    if not found:
        raise InputError("the file does not hold any questions", where=str(path), fix="put the right one in its place")
    return Part(name, found, digest.hexdigest()[:8])
