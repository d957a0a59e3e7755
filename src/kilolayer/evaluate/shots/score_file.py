"""Scores stored in a run's folder: shots.json, a table by signature."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kilolayer.errors import InputError
from kilolayer.evaluate.shots.score import ShotScore
from kilolayer.files.paths import kind_of
from kilolayer.files.reading import read_json
from kilolayer.files.writing import write

FILE = "shots.json"
TEXTS, NUMBERS, OPTIONAL_NUMBERS = (
    ("task", "metric", "norm"),
    ("shots", "value", "questions", "cut"),
    ("standard_error", "chance"),
)


def read_scores(folder: Path) -> dict[str, dict[str, Any]]:
    """The contents of shots.json; its form is checked, because the folder may be untrusted. Empty if there is no such file."""
    path = folder / FILE
    if kind_of(path) is None:
        return {}
    kept = read_json(path)
    if not isinstance(kept, dict) or not all(map(_is_score, kept.values())):
        raise InputError("the file does not hold scores", where=str(path), fix="delete it, and evaluate again")
    return kept


def add_scores(folder: Path, scores: Sequence[ShotScore], weights: Mapping[str, Any]) -> None:
    """Add scores to shots.json, replacing those with the same signature. weights: the checkpoints that were scored."""
    new = {score.signature: {**score.table(), "weights": dict(weights)} for score in scores}
    write(folder / FILE, json.dumps({**read_scores(folder), **new}, indent=1))


def _is_score(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and all(isinstance(entry.get(name), str) for name in TEXTS)
        and all(_is_number(entry.get(name)) for name in NUMBERS)
        and all(entry.get(name) is None or _is_number(entry[name]) for name in OPTIONAL_NUMBERS)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
