"""Test results of a translator: translations, scores with signatures, error analysis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kilolayer.data.corpora import ScoredPart
from kilolayer.data.held_out import HeldOut
from kilolayer.data.parallel import ParallelText
from kilolayer.errors import InputError
from kilolayer.evaluate.buckets import accuracy_by_frequency, bleu_by_length, word_frequencies
from kilolayer.evaluate.scores import Score, Unavailable, pivot_averages, score_all
from kilolayer.files.writing import write
from kilolayer.tasks.results import write_results

SAMPLES = 20


@dataclass(frozen=True)
class TestResult:
    """The results on one part of the test set: sources, references, hypotheses, and their scores."""

    part: ScoredPart
    sources: list[str]
    references: list[str]
    hypotheses: list[str]
    scores: dict[str, Score | Unavailable]

    @classmethod
    def of(cls, part: ScoredPart, pairs: Sequence[tuple[str, str]], hypotheses: list[str]) -> TestResult:
        """Score one hypothesis for each pair of source and reference."""
        sources, references = [source for source, _ in pairs], [target for _, target in pairs]
        return cls(part, sources, references, hypotheses, score_all(hypotheses, references))


def write_translations(
    folder: Path,
    results: list[TestResult],
    train: Sequence[ParallelText],
    held_out: HeldOut,
    weights: Mapping[str, Any] | None = None,
) -> None:
    """Write scores.json, samples.json and the hypotheses into the run folder, for the report and for comparisons.

    train: the training text, whose words are counted for the error analysis. held_out: the text that was translated, which is
    recorded. weights: which checkpoints translated.
    """
    for result in results:
        write(hypotheses_path(folder, result.part), "".join(f"{line}\n" for line in result.hypotheses))
    samples = [
        {"source": source, "reference": reference, "hypothesis": hypothesis}
        for result in results
        for source, reference, hypothesis in list(zip(result.sources, result.references, result.hypotheses, strict=True))[
            : max(1, SAMPLES // len(results))
        ]
    ]
    write_results(folder, samples, {**scores_of(results, train), "held_out": {"test": held_out.test}}, weights)


def check_same_test(scores: Mapping[str, Any], now: HeldOut, folder: Path) -> None:
    """Raise if scores.json is known to be of another test set than the one that is there now."""
    match scores.get("held_out"):
        case {"test": str(before)} if before != now.test:
            what = "the test set has changed since the run translated it"
            fix = "restore its files; or delete scores.json, and evaluate the run again"
            raise InputError(what, where=str(folder), fix=fix)


def scores_of(results: list[TestResult], train: Sequence[ParallelText]) -> dict[str, Any]:
    """The contents of scores.json for these translations: scores, averages, and where the errors are."""
    return add_scores({}, {result.part: result.scores for result in results}) | _error_analysis(results, train)


def add_scores(document: Mapping[str, Any], scores: Mapping[ScoredPart, Mapping[str, Score | Unavailable]]) -> dict[str, Any]:
    """Add scores to the contents of scores.json: a table per part and, if several directions share a language, averages."""
    names = part_names(list(scores))
    tables = {
        name: {**document.get(name, {}), **{key: asdict(score) for key, score in scores[part].items()}}
        for part, name in names.items()
    }
    averages: dict[str, dict[str, float]] = {}
    for set_name in dict.fromkeys(part.name for part in scores):
        values = {
            part.direction: {key: each["value"] for key, each in tables[name].items() if "value" in each}
            for part, name in names.items()
            if part.name == set_name
        }
        averages |= {f"{set_name} {side}".strip(): means for side, means in pivot_averages(values).items() if len(values) > 1}
    return {**document, **tables, **({"averages": averages} if averages else {})}


def part_names(parts: Sequence[ScoredPart]) -> dict[ScoredPart, str]:
    """The name of each part in scores.json: "test", plus the set's name and the direction if needed: "test flores en-de"."""
    directions = {part.direction for part in parts}
    return {
        part: " ".join(filter(None, ("test", part.name, part.direction.name if len(directions) > 1 else ""))) for part in parts
    }


def hypotheses_path(folder: Path, part: ScoredPart) -> Path:
    """The file of a run's translations: test.en-de.txt, or test.flores.en-de.txt for a named set."""
    return folder / ".".join(filter(None, ("test", part.name, part.direction.name, "txt")))


def _error_analysis(results: list[TestResult], train: Sequence[ParallelText]) -> dict[str, Any]:
    """Buckets of words by training frequency and of sentences by length: a list, or a list per test set if there are several.

    Without training text there are no frequencies.
    """
    names = part_names([result.part for result in results])
    frequency: dict[str, Any] = {}
    length: dict[str, Any] = {}
    for language in dict.fromkeys(result.part.direction.target for result in results):
        texts = [text for text in train if text.direction.target == language]
        seen = word_frequencies(target for text in texts for _, target in text.pairs())
        for result in results:
            if result.part.direction.target == language:
                words = accuracy_by_frequency(result.hypotheses, result.references, seen)
                sentences = bleu_by_length(result.hypotheses, result.references)
                frequency[names[result.part]] = [bucket.to_json() for bucket in words]
                length[names[result.part]] = [bucket.to_json() for bucket in sentences]
    found: dict[str, Any] = {"frequency_buckets": frequency, "length_buckets": length}
    if len(results) == 1:
        (name,) = names.values()
        found = {kind: each[name] for kind, each in found.items()}
    return found if train else {"length_buckets": found["length_buckets"]}
