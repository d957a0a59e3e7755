"""A finished run on its test part: translations, scores with signatures, error analysis."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kilolayer.data.parallel import Direction
from kilolayer.evaluate.buckets import accuracy_by_frequency, bleu_by_length, word_frequencies
from kilolayer.evaluate.scores import STANDARD, Score, Unavailable, score_all
from kilolayer.generate.config import SearchConfig
from kilolayer.models.encoder_decoder import EncoderDecoder
from kilolayer.tasks.translation import TranslationTask
from kilolayer.train.run import Run

SAMPLES = 20


@dataclass(frozen=True)
class TestResult:
    """The test part of one direction: sources, references, hypotheses, and their scores."""

    direction: Direction
    sources: list[str]
    references: list[str]
    hypotheses: list[str]
    scores: dict[str, Score | Unavailable]


def score_test(
    model: EncoderDecoder, task: TranslationTask, search: SearchConfig, metrics: Sequence[Any] = STANDARD
) -> list[TestResult]:
    """Translate and score the test part of every direction."""
    results = []
    for direction in task.corpora.directions:
        pairs = task.corpora.test_of(direction)
        if not pairs:
            continue
        sources, references = [source for source, _ in pairs], [target for _, target in pairs]
        hypotheses = [answer.text for answer in task.translate(model, sources, direction, search)]
        scores = score_all(hypotheses, references, metrics)
        results.append(TestResult(direction, sources, references, hypotheses, scores))
    return results


def write_results(run: Run, task: TranslationTask, results: list[TestResult]) -> None:
    """Leave scores.json, samples.json and the hypotheses in the run folder, for the report and for comparisons."""
    document: dict[str, Any] = {}
    for result in results:
        name = "test" if len(results) == 1 else f"test {result.direction.name}"
        document[name] = {key: asdict(score) for key, score in result.scores.items()}
        hypotheses_path(run.folder, result.direction).write_text(
            "".join(f"{line}\n" for line in result.hypotheses), encoding="utf-8"
        )
    if len(results) == 1:
        result = results[0]
        seen = word_frequencies(target for text in task.corpora.train for _, target in text.pairs())
        buckets = accuracy_by_frequency(result.hypotheses, result.references, seen)
        document["frequency_buckets"] = [bucket.to_json() for bucket in buckets]
        lengths = bleu_by_length(result.hypotheses, result.references)
        document["length_buckets"] = [bucket.to_json() for bucket in lengths]
    samples = [
        {"source": source, "reference": reference, "hypothesis": hypothesis}
        for result in results
        for source, reference, hypothesis in list(zip(result.sources, result.references, result.hypotheses, strict=True))[
            : max(1, SAMPLES // len(results))
        ]
    ]
    (run.folder / "samples.json").write_text(json.dumps(samples, indent=1, ensure_ascii=False), encoding="utf-8")
    # Last and at once: a run with this file is finished.
    partial = run.folder / "scores.partial"
    partial.write_text(json.dumps(document, indent=1), encoding="utf-8")
    partial.replace(run.folder / "scores.json")


def hypotheses_path(folder: Path, direction: Direction) -> Path:
    """Where a run keeps its translations of the test part."""
    return folder / f"test.{direction.name}.txt"
