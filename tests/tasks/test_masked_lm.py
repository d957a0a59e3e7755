"""The task of masked language modelling: its losses against loops written out, its validation, its test."""

from __future__ import annotations

import json
import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer.cli.plan import typical_work
from kilolayer.config import build, merge
from kilolayer.data.grammar import pairs
from kilolayer.data.masking import fixed_masks
from kilolayer.errors import OptionError
from kilolayer.speed.fast import fast_form
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.masked_lm.config import MaskedLMConfig
from kilolayer.tasks.masked_lm.task import MaskedLMTask

LENGTH = 24
TOKENIZERS = {"bytes": {"kind": "bytes"}, "pieces": {"vocab_size": 340}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of one to three words or of several sentences, with letters of two bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    sentences = [german for _, german in pairs(120, seed=1, unseen=False)]
    documents = [text for line in sentences for text in (" ".join(line.split()[:2]), f"{line} ß日 {line}")]
    for part, lines in {"train": documents[:200], "valid": documents[200:220], "test": documents[220:]}.items():
        (folder / f"{part}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return folder


def config_of(corpus: Path, tokenizer: str = "bytes", **sections: Any) -> MaskedLMConfig:
    text = {part: str(corpus / f"{part}.jsonl") for part in ("train", "valid", "test")}
    tables = {
        "task": "masked_lm",
        "model": {"layers": 2, "dim": 16, "heads": 2, "ffn_dim": 32},
        "text": {**text, "length": LENGTH},
        "tokenizer": TOKENIZERS[tokenizer],
        "batches": {"tokens": 4 * LENGTH},
        "train": {"device": "cpu"},
    }
    config = build(RunConfig, merge(tables, sections))
    assert isinstance(config, MaskedLMConfig)
    return config


def prepared(corpus: Path, cache: Path, tokenizer: str = "bytes", **sections: Any) -> MaskedLMTask:
    return MaskedLMTask.prepare(config_of(corpus, tokenizer, **sections), cache)


def model_for(task: MaskedLMTask, **options: Any) -> kl.Encoder:
    config = task.resolve(task.config).model
    model = kl.build_model(build(kl.ModelConfig, {**_plain(config), **options}), dtype=torch.float64, seed=1)
    assert isinstance(model, kl.Encoder)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return model


def _plain(config: kl.ModelConfig) -> dict[str, Any]:
    names = ("shape", "layers", "dim", "heads", "ffn_dim", "vocab_size")
    return {**{name: getattr(config, name) for name in names}, "pad_id": "none"}


def piece_by_piece(model: kl.Encoder, parts: tuple[torch.Tensor, ...]) -> tuple[float, int, int]:
    """Summed loss, right guesses and hidden tokens of a batch, each document by a forward of its own."""
    tokens, *_, positions, labels = (part.tolist() for part in parts)
    nll, correct, count = 0.0, 0, 0
    for row, where, what in zip(tokens, positions, labels, strict=True):
        hidden = {position: label for position, label in zip(where, what, strict=True) if label}
        begin = 0
        while begin < len(row) and row[begin]:
            end = row.index(3, begin) + 1
            scores = model(torch.tensor([row[begin:end]])).logits[0].tolist()
            for position in range(begin, end):
                if position in hidden:
                    own = scores[position - begin]
                    largest = max(own)
                    total = largest + math.log(sum(math.exp(score - largest) for score in own))
                    nll += total - own[hidden[position]]
                    correct += own[hidden[position]] == largest
                    count += 1
            begin = end
        assert not any(row[begin:])
    return nll, correct, count


MASKING = {"single tokens": {}, "spans, some kept": {"masking": {"span": 3.0, "keep": 0.1, "random": 0.1}}}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("masking", MASKING)
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("options", [{}, {"positions": "rotary"}, {"positions": "t5"}], ids=str)
@torch.no_grad()
def test_the_loss_of_packed_rows_is_that_of_their_documents_one_by_one(
    corpus: Path, cache: Path, tokenizer: str, masking: str, options: dict[str, Any]
) -> None:
    task = prepared(corpus, cache, tokenizer, **MASKING[masking])
    model = model_for(task, **options).eval()
    seen = set()
    for batch in islice(task.training_batches(1), 12):
        seen.add(len(batch.parts))
        nll, _, count = piece_by_piece(model, batch.parts)
        for form in (model, fast_form(model)):
            loss = task.loss(form, batch.parts, hidden_states=False)
            assert float(loss.nll) == pytest.approx(nll, rel=1e-6)
            assert float(loss.total) == pytest.approx(nll, rel=1e-6)
        assert int(loss.count) == count == batch.tokens
        assert loss.output.logits is not None
        assert loss.output.logits.shape == (4, task.masker.most, task.vocabulary.vocab_size + 1)
    assert 5 in seen  # rows that documents share


@pytest.mark.parametrize("masking", MASKING)
@torch.no_grad()
def test_validation_and_test_are_the_loss_and_accuracy_of_hidden_tokens(corpus: Path, cache: Path, masking: str) -> None:
    task = prepared(corpus, cache, **MASKING[masking])
    model = model_for(task).train()
    assert task.valid is not None
    assert task.test is not None

    def expected(rows: Any, most: int | None) -> tuple[float, ...]:
        found = [piece_by_piece(model.eval(), each.parts) for each in fixed_masks(rows, task.masker, 3, most)]
        model.train()
        return tuple(map(sum, zip(*found, strict=True)))

    for most in (5, 1000):
        nll, correct, count = expected(task.valid, most)
        found = task.validate(model, most)
        assert found is not None
        assert (found.correct, found.tokens) == (correct, count)
        assert found.metrics() == {
            "loss": pytest.approx(nll / count, rel=1e-6),
            "perplexity": pytest.approx(math.exp(nll / count), rel=1e-6),
            "accuracy": pytest.approx(100 * correct / count),
        }
        assert found.quality == -found.loss
    assert model.training
    nll, correct, count = expected(task.test, None)
    scores = task.test_scores(model)
    assert scores["loss"].value == pytest.approx(nll / count, rel=1e-6)
    assert scores["accuracy"].value == pytest.approx(100 * correct / count)
    options = "span:3|keep:0.1|random:0.1" if MASKING[masking] else "span:1|keep:0|random:0"
    assert scores["loss"].signature == f"rate:0.15|{options}|length:24|masked:{count}"


def test_held_out_masks_do_not_depend_on_seed_or_batch(corpus: Path, cache: Path) -> None:
    tasks = [prepared(corpus, cache), prepared(corpus, cache, batches={"tokens": 7 * LENGTH}, train={"seed": 5})]
    model = model_for(tasks[0])
    first, second = (task.validate(model, 1000) for task in tasks)
    assert first is not None
    assert second is not None
    assert first.nll == pytest.approx(second.nll, rel=1e-9)
    assert (first.correct, first.tokens) == (second.correct, second.tokens)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_test_leaves_scores_and_samples(corpus: Path, cache: Path, tmp_path: Path, tokenizer: str) -> None:
    task = prepared(corpus, cache, tokenizer)
    model = model_for(task)
    task.score(model, tmp_path, {"chosen": "best", "steps": [1]})
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["weights"] == {"chosen": "best", "steps": [1]}
    assert {key: each["value"] for key, each in scores["test"].items()} == pytest.approx(
        {key: each.value for key, each in task.test_scores(model).items()}
    )
    samples = json.loads((tmp_path / "samples.json").read_text())
    documents = [json.loads(line)["text"] for line in (corpus / "test.jsonl").read_text().splitlines()]
    assert len(samples) == 5
    for sample in samples:
        assert any(sample["text"] in document for document in documents)
        parts = sample["masked"].split("<mask>")
        assert len(parts) > 1
        assert sample["text"].startswith(parts[0].rstrip("\ufffd"))
        assert sample["filled"].startswith(parts[0].rstrip("\ufffd"))


def test_the_model_has_a_row_for_the_mask(corpus: Path, cache: Path) -> None:
    for tokenizer, size in (("bytes", 261), ("pieces", 341)):
        config = config_of(corpus, tokenizer)
        assert config.model.vocab_size == size
        assert config.model.tie_embeddings is True
        assert config.model.pad_id is None
        assert (config.model.shape, config.train.label_smoothing) == ("encoder", 0.0)
        task = prepared(corpus, cache, tokenizer)
        assert task.resolve(config).model.vocab_size == task.vocabulary.vocab_size + 1 == size
        assert task.masker.mask == task.vocabulary.vocab_size


def test_the_plan_counts_scores_at_hidden_places_alone(corpus: Path) -> None:
    work = typical_work(config_of(corpus, masking={"rate": 0.5}), None)
    assert (work.batch, work.length, work.scored, work.scores) == (4, LENGTH, 11, 44)
    assert typical_work(config_of(corpus), 102).scored == 15


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"model": {"shape": "decoder"}}, "cannot be trained in the shape 'decoder'"),
    ({"model": {"pad_id": 0}}, "pad_id has no effect"),
    ({"model": {"head": {}}}, "a head scores whole sequences"),
    ({"model": {"vocab_size": 260}}, "vocab_size is 260, but the vocabulary has 261"),
    ({"model": {"positions": "learned", "max_length": 10}}, "the model has 10 positions"),
    ({"text": {"length": 2}}, "no room for a token between start and end"),
    ({"text": {"stride": 2}}, "text.stride has no effect on the task"),
    ({"batches": {"tokens": 10}}, "a batch of 10 tokens cannot hold"),
    ({"batches": {"shapes": 3}}, "shapes has no effect"),
    ({"masking": {"rate": 1.5}}, "rate"),
    ({"masking": {"mean": 3}}, "mean"),
    ({"masking": {"keep": 0.9, "random": 0.2}}, "together"),
    ({"search": {"beam": 2}}, "search.beam has no effect"),
    ({"text": {"valid": []}, "train": {"patience": 2}}, "patience has no effect"),
]


@pytest.mark.parametrize(("sections", "message"), FAULTS)
def test_what_contradicts_itself_is_refused(corpus: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        config_of(corpus, **sections)


@pytest.mark.parametrize("moe", [None, {"experts": 2}], ids=["dense", "sparse"])
def test_calibration_sees_documents_and_no_filling(corpus: Path, cache: Path, moe: Any) -> None:
    task = prepared(corpus, cache, batches={"tokens": 200 * LENGTH})
    batches = task.training_batches(1)
    batch = next(each for each in islice(batches, len(batches)) if each.packed.real is not None)
    options = {"recipe": "admin", **({"moe": moe} if moe else {})}
    packed, apart = (model_for(task, **options) for _ in range(2))
    apart.load_state_dict(packed.state_dict())
    inputs = task.model_inputs(batch.parts)
    assert bool(inputs["mask"].any(dim=1).all())
    pieces = []
    for row in batch.packed.tokens.tolist():
        while row and row[0]:
            end = row.index(3) + 1
            pieces.append(row[:end] + [0] * (LENGTH - end))
            row = row[end:]
    tokens = torch.tensor(pieces)
    found, expected = kl.calibrate(packed, inputs), kl.calibrate(apart, {"tokens": tokens, "mask": tokens != 0})
    assert found.encoder == pytest.approx(expected.encoder, rel=1e-9)
    assert len(found.encoder) == 4
