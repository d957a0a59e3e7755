"""The task of classification: its loss and metrics against loops written out, its validation, its test, what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer.config import build, merge
from kilolayer.data.vocabulary import ByteVocabulary
from kilolayer.errors import InputError, OptionError
from kilolayer.tasks.classify.config import ClassifyConfig
from kilolayer.tasks.classify.task import ClassifyTask
from tests.fixtures.small_classifiers import classify_table

NUMBERS = {"examples": {"kind": "number", "label": "score"}}
PAIRS = {"examples": {"second": "b", "length": 70}}


def config_of(examples: Path, /, **sections: dict[str, Any]) -> ClassifyConfig:
    return build(ClassifyConfig, classify_table(examples, **sections))


def prepared(examples: Path, cache: Path, /, **sections: dict[str, Any]) -> ClassifyTask:
    return ClassifyTask.prepare(config_of(examples, **sections), cache)


def model_for(task: ClassifyTask, **options: Any) -> kl.Encoder:
    sizes: dict[str, Any] = {"layers": 2, "dim": 16, "heads": 2, "ffn_dim": 32, "vocab_size": task.vocabulary.vocab_size}
    head = kl.Head(outputs=len(task.classes) or 1, dropout=0.0)
    model = kl.build_model(kl.ModelConfig(shape="encoder", head=head, **sizes | options), dtype=torch.float64, seed=1)
    assert isinstance(model, kl.Encoder)
    return model.eval()


def rows_of(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text().splitlines()[1:]]


def tokens_of(*sentences: str) -> list[int]:
    first, *second = ([byte + 4 for byte in sentence.encode()] for sentence in sentences)
    line = [2, *first, 3]
    for each in second:
        line += [3, *each, 3]
    return line


@torch.no_grad()
def one_by_one(model: kl.Encoder, lines: list[list[int]]) -> list[list[float]]:
    """The scores of each line, by a forward of its own without padding."""
    return [model(torch.tensor([line])).logits[0].tolist() for line in lines]


def cross_entropy(scores: list[float], label: int, smoothing: float) -> float:
    total = math.log(sum(math.exp(score) for score in scores))
    each = [total - score for score in scores]
    return (1 - smoothing) * each[label] + smoothing * sum(each) / len(each)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_of_classes_is_that_of_a_loop(examples: Path, cache: Path, smoothing: float) -> None:
    task = prepared(examples, cache, train={"label_smoothing": smoothing}, **PAIRS)
    assert task.classes == ("bad", "good")
    model = model_for(task)
    batches = task.training_batches(seed=3)
    found = [task.loss(model, next(batches).parts, hidden_states=False) for _ in range(len(batches))]
    rows = rows_of(examples / "train.tsv")
    scores = one_by_one(model, [tokens_of(a, b) for a, b, _, _ in rows])
    labels = [("bad", "good").index(row[2]) for row in rows]
    for part, share in (("total", smoothing), ("nll", 0.0)):
        expected = sum(cross_entropy(score, label, share) for score, label in zip(scores, labels, strict=True))
        assert sum(getattr(each, part).item() for each in found) == pytest.approx(expected, rel=1e-9)
    assert [int(each.count) for each in found] == [8] * 8 + [6]


def test_the_loss_of_numbers_is_the_squared_error(examples: Path, cache: Path) -> None:
    task = prepared(examples, cache, **NUMBERS)
    model = model_for(task)
    batches = task.training_batches(seed=3)
    found = [task.loss(model, next(batches).parts, hidden_states=False) for _ in range(len(batches))]
    rows = rows_of(examples / "train.tsv")
    scores = one_by_one(model, [tokens_of(row[0]) for row in rows])
    expected = sum((score[0] - float(row[3])) ** 2 for score, row in zip(scores, rows, strict=True))
    assert sum(each.total.item() for each in found) == pytest.approx(expected, rel=1e-6)  # labels are fp32
    assert sum(each.nll.item() for each in found) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("sections", [{}, NUMBERS], ids=["classes", "numbers"])
@pytest.mark.parametrize("moe", [None, kl.MoE(experts=4)], ids=["dense", "sparse"])
def test_rows_that_fill_up_a_batch_have_no_part_in_the_gradient(
    examples: Path, cache: Path, sections: dict[str, Any], moe: kl.MoE | None
) -> None:
    task = prepared(examples, cache, **sections)
    model = model_for(task, moe=moe).train()
    batches = task.training_batches(seed=3)
    last = [next(batches) for _ in range(len(batches))][-1]
    tokens, labels = last.parts
    assert (tokens[6:] == 0).all()

    def gradients(*parts: torch.Tensor) -> dict[str, torch.Tensor]:
        model.zero_grad()
        found = task.loss(model, parts, hidden_states=False)
        (found.total + found.output.router_loss * found.count).backward()
        return {name: torch.zeros_like(w) if w.grad is None else w.grad.clone() for name, w in model.named_parameters()}

    torch.testing.assert_close(gradients(tokens, labels), gradients(tokens[:6], labels[:6]), rtol=1e-9, atol=1e-12)
    assert torch.equal(task.model_inputs(last.parts)["tokens"], tokens[:6])


@pytest.mark.parametrize("most", [20, 11])
def test_validation_gives_loss_and_metrics_of_examples_from_all_over_the_set(examples: Path, cache: Path, most: int) -> None:
    task = prepared(examples, cache)
    model = model_for(task).train()
    found = task.validate(model, most)
    assert found is not None
    assert model.training
    rows = rows_of(examples / "valid.tsv")
    rows = [rows[place * len(rows) // most] for place in range(most)]
    scores = one_by_one(model.eval(), [tokens_of(row[0]) for row in rows])
    labels = [("bad", "good").index(row[2]) for row in rows]
    expected = sum(cross_entropy(score, label, 0.0) for score, label in zip(scores, labels, strict=True)) / most
    right = sum((score[1] > score[0]) == bool(label) for score, label in zip(scores, labels, strict=True))
    assert found.loss == pytest.approx(expected, rel=1e-5)
    assert found.quality == pytest.approx(100 * right / most)
    assert found.metrics() == {"loss": found.loss, "metric": found.quality, "accuracy": found.quality}


def test_a_batch_has_no_more_rows_than_there_are_examples(examples: Path, cache: Path) -> None:
    batch = next(prepared(examples, cache, examples={"rows": 100_000}).training_batches(1))
    assert len(batch.parts[0]) == batch.tokens == 70


def test_the_metric_to_choose_by_is_the_quality(examples: Path, cache: Path) -> None:
    task = prepared(examples, cache, examples={"metric": "matthews"})
    found = task.validate(model_for(task), 20)
    assert found is not None
    assert list(found.scores) == ["matthews", "accuracy"]
    assert found.quality == found.scores["matthews"].value
    numbers = prepared(examples, cache, **NUMBERS)
    measured = numbers.validate(model_for(numbers), 20)
    assert measured is not None
    assert list(measured.scores) == ["pearson", "spearman"]
    assert prepared(examples, cache, examples={"valid": "none"}).validate(model_for(task), 20) is None


def test_a_test_part_with_labels_is_scored(examples: Path, cache: Path, tmp_path: Path) -> None:
    task = prepared(examples, cache, **PAIRS)
    model = model_for(task)
    task.score(model, tmp_path, {"chosen": "best", "steps": [1], "passed_over": []})
    scores = json.loads((tmp_path / "scores.json").read_text())
    rows = rows_of(examples / "test.tsv")
    found = one_by_one(model, [tokens_of(a, b) for a, b, _, _ in rows])
    labels = ["good" if score[1] > score[0] else "bad" for score in found]
    right = sum(label == row[2] for label, row in zip(labels, rows, strict=True))
    assert list(scores["test"]) == ["metric"]
    assert scores["test"]["metric"]["value"] == pytest.approx(100 * right / 13)
    assert scores["test"]["metric"]["signature"].startswith("metric:accuracy|n:13|")
    assert scores["weights"]["steps"] == [1]
    samples = json.loads((tmp_path / "samples.json").read_text())
    assert samples[0] == {"first": "so good", "second": "yes", "label": "good", "prediction": labels[0]}
    assert not (tmp_path / "test.predictions.tsv").exists()


def test_a_test_part_without_labels_is_predicted_in_glues_form(examples: Path, cache: Path, tmp_path: Path) -> None:
    task = prepared(examples, cache, examples={"test": str(examples / "bare.tsv")})
    model = model_for(task)
    task.score(model, tmp_path)
    found = one_by_one(model, [tokens_of(row[0]) for row in rows_of(examples / "bare.tsv")])
    labels = ["good" if score[1] > score[0] else "bad" for score in found]
    lines = (tmp_path / "test.predictions.tsv").read_text().splitlines()
    assert lines == ["index\tprediction", *(f"{index}\t{label}" for index, label in enumerate(labels))]
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert list(scores) == ["validation"]
    assert scores["validation"]["metric"]["value"] == pytest.approx(task.validate(model, 20).quality)  # type: ignore[union-attr]
    assert json.loads((tmp_path / "samples.json").read_text())[0]["label"] == "good"


def test_numbers_are_predicted_as_numbers(examples: Path, cache: Path, tmp_path: Path) -> None:
    task = prepared(examples, cache, examples={"test": str(examples / "bare.tsv"), **NUMBERS["examples"]})
    model = model_for(task)
    task.score(model, tmp_path)
    found = one_by_one(model, [tokens_of(row[0]) for row in rows_of(examples / "bare.tsv")])
    lines = (tmp_path / "test.predictions.tsv").read_text().splitlines()[1:]
    assert [float(line.split("\t")[1]) for line in lines] == pytest.approx([score[0] for score in found], abs=1e-3)


def test_the_data_decide_the_head_the_classes_and_the_vocabulary(examples: Path, cache: Path) -> None:
    config = config_of(examples)
    task = ClassifyTask.prepare(config, cache)
    resolved = task.resolve(config)
    assert resolved.model.head is not None
    assert resolved.model.head.outputs == 2
    assert resolved.examples.classes == ["bad", "good"]
    assert resolved.model.vocab_size == ByteVocabulary.vocab_size
    numbers = config_of(examples, **NUMBERS)
    found = ClassifyTask.prepare(numbers, cache).resolve(numbers)
    assert found.model.head is not None
    assert found.model.head.outputs == 1
    assert found.examples.classes == []


def test_a_vocabulary_of_pieces_is_trained_on_the_sentences(examples: Path, cache: Path) -> None:
    task = prepared(examples, cache, tokenizer={"kind": "unigram", "vocab_size": 290}, **PAIRS)
    assert task.vocabulary.vocab_size == 290
    text = "we go to sea\twith a dog"
    assert task.vocabulary.decode(task.vocabulary.encode(text.encode()).tolist()) == text


BODY = {"embedding.weight": (5, 4), "encoder.blocks.0.w": (4, 4)}
HEAD = {"head.dense.weight": (4, 4), "head.output.weight": (2, 4)}


def tensors(shapes: dict[str, tuple[int, ...]], value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, value) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("theirs", "from_them"),
    [
        (BODY, set(BODY)),
        ({**BODY, "vocabulary.weight": (5, 4)}, set(BODY)),
        ({**BODY, **HEAD, "head.output.weight": (3, 4)}, set(BODY)),
        ({**BODY, **HEAD}, {*BODY, *HEAD}),
        ({**BODY, **HEAD, "encoder.blocks.0.w": (8, 4)}, {*BODY, *HEAD}),
    ],
    ids=["tied", "untied", "other classes", "as many classes", "experts of which a process has a part"],
)
def test_a_start_gives_its_body_and_a_head_that_fits(
    examples: Path, cache: Path, theirs: dict[str, tuple[int, ...]], from_them: set[str]
) -> None:
    task = prepared(examples, cache)
    found = task.adopt(tensors(theirs, 1.0), tensors({**BODY, **HEAD}, 2.0))
    assert found.keys() == {*BODY, *HEAD}
    assert {name for name, tensor in found.items() if (tensor == 1).all()} == from_them


def test_fine_tuning_has_its_usual_settings_where_nothing_is_said(examples: Path) -> None:
    table = classify_table(examples)
    del table["train"]
    train = build(ClassifyConfig, table).train
    assert (train.optimizer, train.schedule, train.label_smoothing) == ("adamw", "linear", 0.0)
    assert (train.epochs, train.warmup_share, train.lr) == (5, 0.06, 3e-4)
    started = build(ClassifyConfig, merge(table, {"train": {"start_from": "run", "steps": 7, "warmup_steps": 2}})).train
    assert (started.epochs, started.steps, started.warmup_share, started.warmup_steps) == (None, 7, None, 2)
    assert started.lr == 3e-5


@pytest.mark.parametrize(
    ("optimizer", "decay"), [(None, 0.1), ("adam", 0.0), ("torch.optim:Rprop", 0.0), ({"name": "torch.optim:SGD"}, 0.0)]
)
def test_the_usual_weight_decay_comes_with_the_usual_optimizer(examples: Path, optimizer: Any, decay: float) -> None:
    table = classify_table(examples)
    table["train"] = {} if optimizer is None else {"optimizer": optimizer}
    assert build(ClassifyConfig, table).train.weight_decay == decay


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"shape": "decoder"}}, "the shape 'decoder' cannot have a head"),
        ({"model": {"pad_id": "none"}}, "the batches of a classifier are padded"),
        ({"model": {"head": "none"}}, "a classifier needs a head"),
        ({"model": {"vocab_size": 261}}, "vocab_size is 261, but the vocabulary has 260 tokens"),
        (
            {"model": {"positions": "learned", "max_length": 39}},
            "the model has 39 positions, but an example has up to 40 tokens",
        ),
        ({"train": {"label_smoothing": 0.1}, **NUMBERS}, "label_smoothing has no effect where labels are numbers"),
        ({"train": {"patience": 2}, "examples": {"valid": "none"}}, "patience has no effect without a validation set"),
        ({"text": {"train": "x"}}, "text.train has no effect on the task 'classify'"),
        ({"train": {"steps": 5, "epochs": 2}}, "epochs and steps are both given"),
        ({"train": {"warmup_steps": 5, "warmup_share": 0.5}}, "warmup_share and warmup_steps are both given"),
    ],
)
def test_configurations_that_contradict_themselves_are_refused(examples: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        config_of(examples, **sections)


def test_a_head_of_other_outputs_than_the_labels_need_is_refused(examples: Path, cache: Path) -> None:
    with pytest.raises(OptionError, match="outputs is 5, but the labels need 2"):
        prepared(examples, cache, model={"head": {"outputs": 5}})


def test_labels_that_no_class_has_are_refused_before_anything_is_trained(examples: Path, cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "valid.tsv"
    path.write_text("a\tb\tlabel\tscore\nx\ty\tugly\t1\n")
    with pytest.raises(InputError, match=r"there is no class 'ugly'\n.*valid.tsv, line 2"):
        prepared(examples, cache, examples={"valid": str(path)})
