"""A translator on the test part: translations, scores with signatures, error analysis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kilolayer.data.parallel import Direction, ParallelText
from kilolayer.evaluate.buckets import accuracy_by_frequency, bleu_by_length, word_frequencies
from kilolayer.evaluate.scores import Score, Unavailable, pivot_averages, score_all
from kilolayer.files.writing import write
from kilolayer.tasks.results import write_results

SAMPLES = 20


@dataclass(frozen=True)
class TestResult:
    """The test part of one direction: sources, references, hypotheses, and their scores."""

    direction: Direction
    sources: list[str]
    references: list[str]
    hypotheses: list[str]
    scores: dict[str, Score | Unavailable]

    @classmethod
    def of(cls, direction: Direction, pairs: Sequence[tuple[str, str]], hypotheses: list[str]) -> TestResult:
        """Score one hypothesis for each pair of source and reference."""
        sources, references = [source for source, _ in pairs], [target for _, target in pairs]
        return cls(direction, sources, references, hypotheses, score_all(hypotheses, references))


def write_translations(
    folder: Path, results: list[TestResult], train: Sequence[ParallelText], weights: Mapping[str, Any] | None = None
) -> None:
    """Leave scores.json, samples.json and the hypotheses in the run folder, for the report and for comparisons.

    train: the training text, whose words are counted for the error analysis. weights: which checkpoints translated.
    """
    for result in results:
        write(hypotheses_path(folder, result.direction), "".join(f"{line}\n" for line in result.hypotheses))
    samples = [
        {"source": source, "reference": reference, "hypothesis": hypothesis}
        for result in results
        for source, reference, hypothesis in list(zip(result.sources, result.references, result.hypotheses, strict=True))[
            : max(1, SAMPLES // len(results))
        ]
    ]
    scores = add_scores({}, {result.direction: result.scores for result in results})
    write_results(folder, samples, scores | _error_analysis(results, train), weights)


def add_scores(document: Mapping[str, Any], scores: Mapping[Direction, Mapping[str, Score | Unavailable]]) -> dict[str, Any]:
    """What scores.json holds, with more scores: a table for each test part and, where directions share a language, averages."""
    names = part_names(list(scores))
    tables = {
        name: {**document.get(name, {}), **{key: asdict(score) for key, score in scores[direction].items()}}
        for direction, name in names.items()
    }
    averages = pivot_averages(
        {
            direction: {key: each["value"] for key, each in tables[name].items() if "value" in each}
            for direction, name in names.items()
        }
    )
    return {**document, **tables, **({"averages": averages} if averages else {})}


def part_names(directions: Sequence[Direction]) -> dict[Direction, str]:
    """What scores.json calls the test part of each direction: "test" where there is one, else "test en-de"."""
    return {direction: "test" if len(directions) == 1 else f"test {direction.name}" for direction in directions}


def hypotheses_path(folder: Path, direction: Direction) -> Path:
    """Where a run keeps its translations of the test part."""
    return folder / f"test.{direction.name}.txt"


def _error_analysis(results: list[TestResult], train: Sequence[ParallelText]) -> dict[str, Any]:
    """Buckets of words by training frequency, of sentences by length: lists or, where there are several, a list a test part."""
    names = part_names([result.direction for result in results])
    frequency: dict[str, Any] = {}
    length: dict[str, Any] = {}
    for language in dict.fromkeys(result.direction.target for result in results):
        texts = [text for text in train if text.direction.target == language]
        seen = word_frequencies(target for text in texts for _, target in text.pairs())
        for result in results:
            if result.direction.target == language:
                words = accuracy_by_frequency(result.hypotheses, result.references, seen)
                sentences = bleu_by_length(result.hypotheses, result.references)
                frequency[names[result.direction]] = [bucket.to_json() for bucket in words]
                length[names[result.direction]] = [bucket.to_json() for bucket in sentences]
    if len(results) == 1:
        return {"frequency_buckets": frequency["test"], "length_buckets": length["test"]}
    return {"frequency_buckets": frequency, "length_buckets": length}
