"""Small classifiers for tests: sentences that are good or bad, and how good they are; two layers, a step in milliseconds."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from kilolayer.config import build, merge
from kilolayer.runs.run import Run, cache_folder, in_steps, prepare
from kilolayer.tasks.config import RunConfig

WORDS = ["cat", "dog", "sun", "sea", "we", "go"]
COUNTS = {"train": 70, "valid": 20, "test": 13}


def write_examples(folder: Path) -> Path:
    """train, valid and test: two sentences, a class and a number; and the test part without labels."""
    folder.mkdir(exist_ok=True)
    draw = random.Random(1)
    for part, count in COUNTS.items():
        rows = [_row(draw) for _ in range(count)]
        rows[:2] = [("so good", "yes", "good", "2.5"), ("so bad", "no", "bad", "-1.0")]
        lines = ["a\tb\tlabel\tscore", *("\t".join(row) for row in rows)]
        (folder / f"{part}.tsv").write_text("".join(f"{line}\n" for line in lines))
    bare = (folder / "test.tsv").read_text().splitlines()
    (folder / "bare.tsv").write_text("".join("\t".join(line.split("\t")[:2]) + "\n" for line in bare))
    return folder


def _row(draw: random.Random) -> tuple[str, str, str, str]:
    label = draw.choice(["good", "bad"])
    words = draw.choices(WORDS, k=draw.randint(1, 7))
    words.insert(draw.randint(0, len(words)), label)
    return " ".join(words), " ".join(draw.choices(WORDS, k=draw.randint(1, 3))), label, str(len(words) / 2)


def classify_table(examples: Path, /, **sections: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a small classifier, with `sections` laid over it."""
    small = {
        "task": "classify",
        "model": {"layers": 2, "dim": 16, "heads": 2, "ffn_dim": 32, "dropout": 0.1, "head": {"dropout": 0.0}},
        "examples": {
            **{part: str(examples / f"{part}.tsv") for part in COUNTS},
            "first": "a",
            "rows": 8,
            "length": 40,
        },
        "tokenizer": {"kind": "bytes"},
        "train": {
            "steps": 6,
            "lr": 1e-2,
            "warmup_steps": 3,
            "log_every": 1,
            "layers_every": 0,
            "valid_every": 100,
            "save_every": 100,
            "device": "cpu",
        },
    }
    return merge(small, sections)


def created(folder: Path, table: dict[str, Any], vocabulary: Any = None) -> Run:
    """A run that was created and has not begun."""
    config = build(RunConfig, table)
    task = prepare(config, cache_folder(), vocabulary)
    return Run.create(folder, in_steps(task.resolve(config), task), task.vocabulary)


def new_classifier(folder: Path, examples: Path, /, **sections: dict[str, Any]) -> Run:
    """The same of a small classifier."""
    return created(folder, classify_table(examples, **sections))
