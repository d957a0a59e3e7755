"""The task of language modelling: its losses against hand computations, its validation, its test."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import kilolayer as kl
from kilolayer.config import build, table_of
from kilolayer.data.documents import TextConfig
from kilolayer.data.grammar import pairs
from kilolayer.data.tokenizer import TokenizerConfig
from kilolayer.evaluate.likelihood import TextLoss, perplexity
from kilolayer.evaluate.masked_likelihood import MaskedLoss
from kilolayer.tasks.causal_lm.config import CausalLMConfig
from kilolayer.tasks.causal_lm.task import CausalLMTask
from kilolayer.tasks.results import read_scores, write_results

TOKENIZERS = {
    "bytes": TokenizerConfig(kind="bytes"),
    "pieces": TokenizerConfig(vocab_size=340, normalization="identity"),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training text in one file; three documents, with letters of two bytes, to validate and to test on."""
    folder = tmp_path_factory.mktemp("corpus")
    sentences = [german for _, german in pairs(318, seed=1, unseen=False)]
    (folder / "train.txt").write_text("\n".join(sentences[:300]), encoding="utf-8")
    for part, lines in {"valid": sentences[300:309], "test": sentences[309:]}.items():
        documents = [{"text": "\n".join(lines[start : start + 3]) + " ▁ß日"} for start in range(0, 9, 3)]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
    return folder


def prepare(corpus: Path, cache: Path, tokenizer: str = "bytes", **options: Any) -> CausalLMTask:
    paths = {"train": [str(corpus / "train.txt")], "valid": [str(corpus / "valid.jsonl")], "test": [str(corpus / "test.jsonl")]}
    text = TextConfig(**{**paths, "length": 24, **options})
    return CausalLMTask.prepare(config_of(text, tokenizer), cache)


def config_of(text: TextConfig, tokenizer: str, **model: Any) -> CausalLMConfig:
    tables = {"text": table_of(text), "tokenizer": table_of(TOKENIZERS[tokenizer]), "batches": {"tokens": 24 * 3}}
    return build(CausalLMConfig, {"task": "causal_lm", "model": model, **tables})


def model_for(task: CausalLMTask, **options: Any) -> kl.Decoder:
    sizes = {"layers": 2, "dim": 16, "heads": 2, "ffn_dim": 32, "pad_id": None}
    config = kl.ModelConfig(shape="decoder", vocab_size=task.vocabulary.vocab_size, **sizes | options)
    model = kl.build_model(config, seed=1)
    assert isinstance(model, kl.Decoder)
    return model


def texts_of(corpus: Path, part: str) -> list[bytes]:
    return [json.loads(line)["text"].encode() for line in (corpus / f"{part}.jsonl").read_text().splitlines()]


def line_of(task: CausalLMTask, corpus: Path, part: str) -> list[int]:
    line = [3]
    for text in texts_of(corpus, part):
        line += [*task.vocabulary.encode(text).tolist(), 3]
    return line


@torch.no_grad()
def one_by_one(model: kl.Decoder, line: list[int], length: int, stride: int) -> float:
    """The summed loss of all tokens but the first, each by a forward of its own over what stands before it."""
    total, model = 0.0, model.eval()
    for start in range(1, len(line)):
        window = 0 if start <= length else -(-(start - length) // stride)
        logits = model(torch.tensor([line[window * stride : start]])).logits[0, -1]
        total += float(F.cross_entropy(logits, torch.tensor(line[start])))
    return total


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("stride", [24, 10, 1])
def test_the_test_scores_every_token_once_with_the_context_that_is_asked_for(
    corpus: Path, cache: Path, tokenizer: str, stride: int
) -> None:
    task = prepare(corpus, cache, tokenizer, stride=stride)
    model = model_for(task, positions="rotary")
    found, line = task.test_scores(model), line_of(task, corpus, "test")
    total, size = one_by_one(model, line, 24, stride), sum(map(len, texts_of(corpus, "test")))
    assert found["bits_per_byte"].value == pytest.approx(total / math.log(2) / size, rel=1e-5)
    assert found["perplexity"].value == pytest.approx(math.exp(total / (len(line) - 1)), rel=1e-4)
    assert found["loss"].value == pytest.approx(total / (len(line) - 1), rel=1e-5)
    assert found["loss"].signature == f"length:24|stride:{stride}|tokens:{len(line) - 1}|bytes:{size}"


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_model_that_knows_nothing_needs_the_logarithm_of_its_vocabulary_for_each_token(
    corpus: Path, cache: Path, tokenizer: str
) -> None:
    task = prepare(corpus, cache, tokenizer)
    model = model_for(task, tie_embeddings=True)
    with torch.no_grad():
        model.embedding.weight.zero_()  # one table for input and output: all scores are 0
    found = task.validate(model, 10_000)
    assert found is not None
    tokens = sum(len(task.vocabulary.encode(text)) + 1 for text in texts_of(corpus, "valid"))
    size = sum(map(len, texts_of(corpus, "valid")))
    assert (found.tokens, found.bytes) == (tokens, size)
    assert found.bits_per_byte == pytest.approx(math.log2(task.vocabulary.vocab_size) * tokens / size, rel=1e-6)
    assert found.perplexity == pytest.approx(task.vocabulary.vocab_size, rel=1e-5)


def test_validation_takes_the_first_windows_and_leaves_no_trace(corpus: Path, cache: Path) -> None:
    task = prepare(corpus, cache)
    model = model_for(task, dropout=0.5).train()
    state = torch.get_rng_state()
    found, again = task.validate(model, 5), task.validate(model, 5)
    assert found == again  # dropout is off
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert found is not None
    line = line_of(task, corpus, "valid")[: 5 * 24 + 1]
    assert found.nll == pytest.approx(one_by_one(model, line, 24, 24), rel=1e-5)
    assert (found.tokens, found.bytes) == (120, 120 - line[1:].count(3))


def test_without_a_validation_part_there_is_no_validation(corpus: Path, cache: Path) -> None:
    task = prepare(corpus, cache, valid=[])
    assert task.validate(model_for(task), 100) is None


def test_held_out_shares_are_tested_on_and_not_trained_on(corpus: Path, cache: Path) -> None:
    task = prepare(corpus, cache, valid=[], test=[], valid_share=0.2, test_share=0.1)
    whole = (corpus / "train.txt").read_bytes()
    encoded = [task.train, task.valid, task.test]
    assert all(abs(text.bytes - share * len(whole)) < 4 for text, share in zip(encoded, (0.7, 0.2, 0.1), strict=True))
    together = b"".join(
        bytes(token - 4 for token in text.read(np.array([0]), len(text))[0].tolist() if token > 3) for text in encoded
    )
    assert together == whole


def test_scores_and_samples_are_left_in_the_folder(corpus: Path, cache: Path, tmp_path: Path) -> None:
    for tokenizer in TOKENIZERS:
        task = prepare(corpus, cache, tokenizer)
        task.score(model_for(task), tmp_path)
        scores = json.loads((tmp_path / "scores.json").read_text())
        assert scores["test"].keys() == {"bits_per_byte", "perplexity", "loss"}
        samples = json.loads((tmp_path / "samples.json").read_text(encoding="utf-8"))
        assert 1 <= len({sample["prompt"] for sample in samples}) == len(samples) <= 5
        text = b"".join(texts_of(corpus, "test")).decode()
        for sample in samples:
            assert sample["prompt"] in text  # without halves of characters; ends of documents leave no trace
            assert sample["text"] in text
            assert 0 <= text.find(sample["text"]) - text.find(sample["prompt"]) - len(sample["prompt"]) <= 1
            assert sample["continuation"]


@pytest.mark.parametrize("loss", [TextLoss(3e6, 10, 10), MaskedLoss(3e6, 10, 0)], ids=["text", "masked"])
def test_scores_of_a_broken_model_are_stored_and_read(loss: Any, tmp_path: Path) -> None:
    write_results(tmp_path, [], {"test": {key: asdict(score) for key, score in loss.scores("").items()}})
    table = read_scores(tmp_path)["test"]
    assert table["loss"]["value"] == 3e5
    assert 1e29 < table["perplexity"]["value"] == perplexity(3e5) < 1e30
    assert perplexity(5.0) == math.exp(5.0)


def test_a_text_shorter_than_a_window_is_scored_too(corpus: Path, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "short").write_text("ab")
    task = prepare(corpus, cache, test=[str(tmp_path / "short")])
    model = model_for(task)
    assert task.test_scores(model)["loss"].value == pytest.approx(one_by_one(model, [3, 101, 102, 3], 24, 24) / 3, rel=1e-5)
    task.score(model, tmp_path)
    assert [each["prompt"] for each in json.loads((tmp_path / "samples.json").read_text())] == ["a"]


def test_the_resolved_text_has_absolute_paths(corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(corpus.parent)
    resolved = (task := prepare(Path(corpus.name), cache)).resolve(task.config).text
    assert resolved.train == [str((corpus / "train.txt").resolve())]
    assert resolved.length == 24
