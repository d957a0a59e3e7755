"""From a masked language model to a classifier that labels lines, as a user types it."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from kilolayer.config import dump, load
from kilolayer.runs import checkpoint
from kilolayer.runs.run import Run, cache_folder
from kilolayer.training.trainer import Trainer
from tests.cli.typed_commands import quietly, refused
from tests.fixtures.small_classifiers import classify_table, write_examples

MASKED = """\
task = "masked_lm"

[model]
layers = 2
dim = 16
heads = 2
ffn_dim = 32
tie_embeddings = false

[text]
train = "{text}"
length = 40

[tokenizer]
kind = "bytes"

[batches]
tokens = 160

[train]
steps = 2
lr = 1e-2
warmup_steps = 1
device = "cpu"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("examples"))


@pytest.fixture(scope="module")
def masked(folder: Path) -> Path:
    """A run of a masked language model of the sentences."""
    lines = (folder / "train.tsv").read_text().splitlines()[1:]
    (folder / "text.txt").write_text("\n".join(line.split("\t")[0] for line in lines))
    (folder / "masked.toml").write_text(MASKED.format(text=folder / "text.txt"))
    code, _, err = quietly("train", folder / "masked.toml", "--run", folder / "masked")
    assert code == 0, err
    return folder / "masked"


def write_config(folder: Path, **examples: object) -> Path:
    table = classify_table(folder)
    del table["model"], table["tokenizer"]
    table["examples"] |= {"second": "b", "length": 70, "test": str(folder / "bare.tsv"), **examples}
    table["train"] = {"epochs": 2, "lr": 1e-2, "device": "cpu"}
    path = folder / f"classify{len(examples)}.toml"
    path.write_text(dump(table))
    return path


@pytest.fixture(scope="module")
def trained(folder: Path, masked: Path) -> tuple[Path, str, str]:
    """A classifier that started from it, and what it printed."""
    code, out, err = quietly("train", write_config(folder), "--run", folder / "run", "--train.start_from", masked)
    assert code == 0, err
    return folder / "run", out, err


def test_training_leaves_everything_in_its_folder(trained: tuple[Path, str, str], masked: Path) -> None:
    run, out, err = trained
    scores = json.loads((run / "scores.json").read_text())
    assert out.splitlines()[-1] == f"accuracy {scores['validation']['metric']['value']:.2f}"
    assert "  examples/s " in err
    assert "step 9: validation loss" in err
    assert f"kilolayer predict {run} < sentences.tsv" in err
    assert "bare.tsv has no column 'label': not scored" in err
    assert len((run / "test.predictions.tsv").read_text().splitlines()) == 14
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "Sample predictions" in page
    assert "Accuracy on the validation set" in page
    assert "examples per second" in page
    assert "loss, mean over examples" in page
    table = load(run / "config.toml")
    assert (table["train"]["steps"], table["train"]["valid_every"], "epochs" in table["train"]) == (18, 9, False)
    assert table["train"]["start_from"] == str(masked)
    assert table["model"]["vocab_size"] == load(masked / "config.toml")["model"]["vocab_size"]


def test_the_start_gives_the_body_to_the_bit(trained: tuple[Path, str, str], masked: Path) -> None:
    run = Run.open(trained[0])
    trainer = Trainer(run, run.task(cache_folder()))
    own = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.begin(None)
    weights = checkpoint.load(checkpoint.steps(masked / "checkpoints")[-1]).model
    assert "vocabulary.weight" in weights
    for name, tensor in trainer.model.state_dict().items():
        expected = own if name.startswith("head.") else weights
        assert torch.equal(tensor, expected[name]), name


def predict(monkeypatch: pytest.MonkeyPatch, data: bytes, *words: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    return quietly("predict", *words)


def test_lines_are_labelled_as_the_test_part_is(
    trained: tuple[Path, str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained[0]
    lines = (folder / "bare.tsv").read_text().split("\n", 1)[1].encode()
    expected = [line.split("\t")[1] for line in (run / "test.predictions.tsv").read_text().splitlines()[1:]]
    code, out, err = predict(monkeypatch, lines, run)
    assert (code, err) == (0, "")
    rows = [line.split("\t") for line in out.splitlines()]
    assert [row[0] for row in rows] == expected
    for label, bad, good in rows:
        shares = {name: float(share) for name, share in (cell.split("=") for cell in (bad, good))}
        assert list(shares) == ["bad", "good"]
        assert sum(shares.values()) == pytest.approx(1, abs=2e-4)
        assert shares[label] == max(shares.values())
    found = json.loads(predict(monkeypatch, lines, run, "--json")[1])
    assert [each["label"] for each in found] == expected
    assert [f"bad={each['probabilities']['bad']:.4f}" for each in found] == [row[1] for row in rows]
    assert found[0]["first"] == "so good"
    assert found[0]["second"] == "yes"


def test_evaluation_shows_the_scores(trained: tuple[Path, str, str]) -> None:
    kept = json.loads((trained[0] / "scores.json").read_text())
    code, out, _ = quietly("evaluate", trained[0], "--json")
    assert (code, json.loads(out)) == (0, {"scores": {"validation": kept["validation"]}, "weights": kept["weights"]})
    assert "metric:accuracy|n:20|" in quietly("evaluate", trained[0])[1]


def test_the_plan_of_a_classifier_counts_its_head(folder: Path) -> None:
    sizes = ["--model.dim", "16", "--model.heads", "2", "--model.layers", "2", "--model.ffn_dim", "32"]
    code, out, err = quietly("plan", write_config(folder), *sizes, "--tokenizer.kind", "bytes", "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert plan["parameters"]["parts"]["head"] == 16 * 16 + 16 + 2 * 16 + 2
    assert (plan["work"]["batch"], plan["work"]["length"]) == (8, 70)


def test_the_plan_of_a_run_that_starts_from_another_is_that_of_its_model(folder: Path, masked: Path) -> None:
    code, out, err = quietly("plan", write_config(folder), "--train.start_from", masked, "--json")
    assert code == 0, err
    model = json.loads(out)["model"]
    assert (model["layers"], model["dim"], model["vocab_size"]) == (2, 16, 261)


def test_a_byte_order_mark_before_the_first_line_is_no_text(
    trained: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = predict(monkeypatch, b"we go\tto sea\n", trained[0])
    assert plain[0] == 0
    assert predict(monkeypatch, b"\xef\xbb\xbfwe go\tto sea\r\n", trained[0]) == plain


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"only one\n", "the run expects two sentences, with a tab between them, per line, but this line has 1"),
        (b"a\tb\tc\n", "this line has 3"),
        (b"a\t \n", "a sentence is empty"),
        (b"\n", "this line has 1"),
        (b"a\t\xff\n", "the text is not valid UTF-8"),
    ],
)
def test_lines_that_are_no_sentences_are_refused(
    trained: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch, line: bytes, message: str
) -> None:
    code, out, err = predict(monkeypatch, b"we go\tto sea\n" + line, trained[0])
    assert (code, out) == (2, "")
    assert message in err
    assert "standard input, line 2" in err


def test_long_lines_are_cut_and_that_is_told(trained: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = predict(monkeypatch, b"sea " * 40 + b"\tdog\nwe\tgo\n", trained[0])
    assert (code, len(out.splitlines())) == (0, 2)
    assert err == "1 line longer than examples.length tokens: truncated\n"


def test_a_run_of_another_task_is_told(
    trained: tuple[Path, str, str], masked: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = predict(monkeypatch, b"", masked)
    assert code == 2
    assert "this run is a masked language model" in err
    words = ["train", write_config(folder), "--run", tmp_path / "run"]
    other = refused(*words, "--train.start_from", masked, "--tokenizer.kind", "unigram")
    assert other[0] == "kilolayer: the vocabulary is not that of the run to start from"
    assert "does not fit the configuration" in refused(*words, "--train.start_from", masked, "--model.ffn_dim", "64")[0]
    wrong = refused("train", folder / "masked.toml", "--run", tmp_path / "run", "--train.start_from", trained[0])
    assert wrong[0] == "kilolayer: a masked language model cannot start from a classifier"
    assert wrong[2].strip() == "name a run that is a masked language model"
    asked = refused("evaluate", trained[0], "--tasks", "copa")
    assert asked[0] == "kilolayer: --tasks has no effect on a classifier"
    assert asked[2].strip() == "remove it: it applies to a language model"


@pytest.mark.parametrize("classes", ['["bad", "good", "odd"]', "[]"])
def test_classes_that_are_not_those_of_the_model_are_refused(
    trained: tuple[Path, str, str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, classes: str
) -> None:
    run = shutil.copytree(trained[0], tmp_path / "run")
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(re.sub(r"classes = \[[^]]*\]", f"classes = {classes}", config))
    code, out, err = predict(monkeypatch, b"so good\tyes\n", run)
    assert (code, out) == (2, "")
    assert f"the model has 2 outputs, but examples.classes lists {len(json.loads(classes))}" in err
    assert "the model has 2 outputs" in refused("evaluate", run, "--test", folder / "train.tsv")[0]


@pytest.mark.slow
def test_numbers_are_predicted_by_a_run_of_numbers(
    masked: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config(folder, kind="number", label="score")
    code, _, err = quietly("train", path, "--run", tmp_path / "run", "--train.start_from", masked)
    assert code == 0, err
    found = [float(line) for line in predict(monkeypatch, b"we go\tto sea\nso good\tyes\n", tmp_path / "run")[1].splitlines()]
    exact = json.loads(predict(monkeypatch, b"we go\tto sea\nso good\tyes\n", tmp_path / "run", "--json")[1])
    assert found == pytest.approx([each["number"] for each in exact], abs=1e-4)
    assert {"pearson", "spearman", "metric"} <= json.loads(
        (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    ).keys()
