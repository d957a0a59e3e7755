"""The scores section of the report: each score with the signature that says how it was computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kilolayer.report.record import Entry, number
from kilolayer.report.table import Table
from kilolayer.tasks.registry import Headline, score_digits


@dataclass(frozen=True)
class Score:
    """One score. value: as text; empty if there is none, and `reason` says why. signature: its fields."""

    name: str
    value: str = ""
    signature: list[str] = field(default_factory=list)
    reason: str = ""


@dataclass(frozen=True)
class ScoredTest:
    """A test set with its scores."""

    name: str
    scores: list[Score]


@dataclass(frozen=True)
class ScoresSection:
    """One test set with its scores; or a table with one row per direction, the averages, and each signature once.

    weights: which checkpoints were scored.
    """

    tests: list[ScoredTest] = field(default_factory=list)
    averages: Table | None = None
    by_direction: Table | None = None
    signatures: list[str] = field(default_factory=list)
    weights: str = ""


def scores_section(scores: dict[str, Any], headline: Headline | None = None) -> ScoresSection:
    """The scores in scores.json; empty if there are none. headline: the task's main score, which may have more decimals."""
    sets = score_sets(scores)
    if len(sets) > 1:
        return replace(_by_direction(sets, scores.get("averages"), headline), weights=scored_weights(scores))
    return ScoresSection(
        [
            ScoredTest(name, [_score(key, score, headline) for key, score in entries.items() if isinstance(score, dict)])
            for name, entries in sets
        ],
        weights=scored_weights(scores),
    )


def scored_weights(scores: dict[str, Any]) -> str:
    """Which checkpoints the scores in scores.json belong to; empty if it does not say."""
    match scores.get("weights"):
        case {"chosen": str(chosen), "steps": list(steps), "passed_over": list(others)}:
            fault = f"; damaged or missing: step {', '.join(map(str, others))}" if others else ""
            return f"weights: {chosen}, step {', '.join(map(str, steps))}{fault}"
    return ""


def score_sets(scores: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The test sets in scores.json: tables whose entries have a value, or the reason why there is none."""
    return [
        (name, entries)
        for name, entries in scores.items()
        if isinstance(entries, dict)
        and any(isinstance(each, dict) and each.keys() & {"value", "reason"} for each in entries.values())
    ]


def _by_direction(sets: Sequence[tuple[str, dict[str, Any]]], averages: Any, headline: Headline | None) -> ScoresSection:
    found = [(key, score) for _, entries in sets for key, score in entries.items() if isinstance(score, dict)]
    names = {key: _name(key, score) for key, score in found}
    header = ["", *names.values()]
    means = averages if isinstance(averages, dict) else {}
    averaged = [
        [f"average {side}", *(show_score(key, {"value": number(means, side, key)}, headline) for key in names)]
        for side in means
    ]
    rows = [[part, *(show_score(key, entries.get(key), headline) for key in names)] for part, entries in sets]
    signatures = [
        f"{names[key]}: {score.get('signature') or 'not available: ' + str(score.get('reason', ''))}" for key, score in found
    ]
    return ScoresSection([], Table(header, averaged), Table(header, rows), list(dict.fromkeys(signatures)))


def _score(key: str, score: Entry, headline: Headline | None) -> Score:
    if not math.isfinite(number(score, "value")):
        return Score(_name(key, score), reason=str(score.get("reason", "it has no value")))
    return Score(_name(key, score), show_score(key, score, headline), str(score.get("signature", "")).split("|"))


def show_score(key: str, score: Any, headline: Headline | None) -> str:
    """The value of an entry of scores.json, with as many decimals as it or the task specifies; a dash if there is none."""
    if not isinstance(score, dict) or not math.isfinite(value := number(score, "value")):
        return "-"
    digits = number(score, "digits")
    return f"{value:.{int(digits) if 0 <= digits <= 10 else score_digits(key, headline)}f}"


def _name(key: str, score: Entry) -> str:
    return str(score.get("name") or key)
