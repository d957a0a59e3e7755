"""Reads and writes the test results in a run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kilolayer import hints
from kilolayer.errors import InputError
from kilolayer.files.reading import read_json
from kilolayer.files.writing import write

VALIDATION = "validation"
"""The key of the validation scores, which are used if there is no test set that can be scored."""
# The count keys of a bucket, then the key of its score.
BUCKETS = {"frequency_buckets": ("matched", "reference", "hypothesis", "f1"), "length_buckets": ("sentences", "bleu")}


def tables_of_tests(scores: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The scores of each test set from scores.json, or those of the validation set if they are there instead."""
    return {name: entry for name, entry in scores.items() if name.startswith("test") or name == "validation"}


def read_scores(folder: Path) -> dict[str, Any]:
    """The contents of scores.json, with the format checked because the folder may come from someone else."""
    path = folder / "scores.json"
    scores = read_json(path)
    if not isinstance(scores, dict) or not all(_fits(name, entry) for name, entry in scores.items()):
        again = f"delete it, and score the run again: {hints.call('evaluate')}"
        raise InputError("the file does not hold scores", where=str(path), fix=again)
    return scores


def read_samples(folder: Path) -> list[dict[str, str]]:
    """The contents of samples.json, with the format checked."""
    path = folder / "samples.json"
    samples = read_json(path)
    if not isinstance(samples, list) or not all(map(_is_sample, samples)):
        raise InputError("the file does not hold samples", where=str(path), fix="delete it and scores.json, and resume the run")
    return samples


def _is_sample(sample: Any) -> bool:
    return isinstance(sample, dict) and all(isinstance(text, str) for text in sample.values())


def _fits(name: str, entry: Any) -> bool:
    """Whether an entry of scores.json has the form that `write_results` writes."""
    if name.startswith("test") or name == VALIDATION:
        return isinstance(entry, dict) and all(_is_score(each) for each in entry.values())
    if name == "averages":
        means = list(entry.values()) if isinstance(entry, dict) else [None]
        return all(isinstance(side, dict) and all(map(_is_number, side.values())) for side in means)
    if name in BUCKETS:
        parts = list(entry.values()) if isinstance(entry, dict) else [entry]
        return all(isinstance(part, list) and all(_is_bucket(each, BUCKETS[name]) for each in part) for part in parts)
    return True


def _is_score(score: Any) -> bool:
    if not isinstance(score, dict) or not isinstance(score.get("name"), str):
        return False
    if "value" not in score:
        return isinstance(score.get("reason"), str)
    digits = score.get("digits", 2)
    known = isinstance(digits, int) and 0 <= digits <= 10
    return known and _is_number(score["value"]) and isinstance(score.get("signature"), str)


def _is_bucket(bucket: Any, keys: tuple[str, ...]) -> bool:
    *counts, score = keys
    return (
        isinstance(bucket, dict)
        and isinstance(bucket.get("label"), str)
        and all(_is_number(bucket.get(key)) for key in counts)
        and score in bucket
        and (bucket[score] is None or _is_number(bucket[score]))
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e30


def write_results(
    folder: Path, samples: Sequence[Mapping[str, str]], scores: Mapping[str, Any], weights: Mapping[str, Any] | None = None
) -> None:
    """Write samples.json, texts for the report, and scores.json: a table of scores for each test set, and further details.

    weights: which of the run's checkpoints were scored.
    """
    write(folder / "samples.json", json.dumps(samples, indent=1, ensure_ascii=False))
    # Written last, because a run with this file is finished.
    write(folder / "scores.json", json.dumps({**scores, **({} if weights is None else {"weights": weights})}, indent=1))
