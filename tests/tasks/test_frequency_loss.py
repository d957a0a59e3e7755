"""The loss of single-word frequencies, against counts of the labels that training shows."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kilolayer.data import frequencies
from kilolayer.data.frequencies import count_tokens, frequency_loss
from kilolayer.runs.metrics import read_metrics
from kilolayer.training.loop import train
from tests.fixtures.small_runs import new_run_of, task_of


def entropy(counts: Counter[int]) -> float:
    total = sum(counts.values())
    return -sum(count / total * math.log(count / total) for count in counts.values())


def labels_of_an_epoch(task: object) -> Counter[int]:
    batches = task.training_batches(seed=3)  # pyright: ignore[reportAttributeAccessIssue]
    counts: Counter[int] = Counter()
    for _ in range(len(batches)):
        batch = next(batches)
        counts.update(batch.parts[-1].flatten().tolist())
    del counts[0]  # padding
    return counts


def test_a_translators_is_the_entropy_of_the_labels_of_an_epoch(tmp_path: Path, corpus: Path) -> None:
    task = task_of(new_run_of("translation", tmp_path / "run", corpus))
    assert task.frequency_loss() == pytest.approx(entropy(labels_of_an_epoch(task)), rel=1e-9)


def test_several_directions_count_as_often_as_an_epoch_shows_them(tmp_path: Path, corpus: Path) -> None:
    sections = {"data": {"directions": ["en-de", "de-en"]}}
    task = task_of(new_run_of("translation", tmp_path / "run", corpus, **sections))
    assert task.frequency_loss() == pytest.approx(entropy(labels_of_an_epoch(task)), rel=1e-9)


@pytest.mark.parametrize("name", ["causal_lm", "masked_lm"])
def test_a_language_models_is_the_entropy_of_its_bytes(tmp_path: Path, corpus: Path, name: str) -> None:
    task = task_of(new_run_of(name, tmp_path / "run", corpus))
    text = getattr(task.train, "text", task.train)
    tokens = text.read(np.array([0]), len(text))[0].tolist()
    counts = Counter(tokens)
    if name == "masked_lm":
        assert counts.pop(tokens[0]) > 2  # ends of documents, of which one stands before the first
    assert task.frequency_loss() == pytest.approx(entropy(counts), rel=1e-9)


def test_a_classifiers_is_that_of_its_classes(tmp_path: Path, corpus: Path) -> None:
    task = task_of(new_run_of("classify", tmp_path / "run", corpus))
    assert task.frequency_loss() == pytest.approx(entropy(Counter(task.train.labels.tolist())), rel=1e-9)


def test_a_long_text_is_read_in_pieces(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = task_of(new_run_of("causal_lm", tmp_path / "run", corpus)).train
    whole = frequency_loss(count_tokens(text))
    monkeypatch.setattr(frequencies, "CHUNK", 100)
    monkeypatch.setattr(frequencies, "MOST_TOKENS", 3000)
    counts = count_tokens(text)
    assert counts.sum() == 3000 < len(text)
    assert frequency_loss(counts) == pytest.approx(whole, abs=0.1)


def test_many_pairs_are_counted_by_some_of_them(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(new_run_of("translation", tmp_path / "run", corpus))
    whole = task.frequency_loss()
    monkeypatch.setattr(frequencies, "MOST_PAIRS", 80)
    assert task.frequency_loss() == pytest.approx(whole, abs=0.15)
    assert task.frequency_loss() != whole


def test_the_metrics_hold_it_once_also_when_the_run_is_resumed(tmp_path: Path, corpus: Path) -> None:
    run = new_run_of("causal_lm", tmp_path / "run", corpus, train={"steps": 2})
    task = task_of(run)
    train(run, task)
    train(run, task, resume=True)
    found = [row for row in read_metrics(run.folder) if row["kind"] == "reference"]
    assert found == [{"kind": "reference", "step": 0, "frequency_loss": task.frequency_loss()}]
