"""The benchmark that fine-tunes on GLUE: it does what `kilolayer train` does, many times in one process."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kilolayer.config import merge
from kilolayer.runs.metrics import read_metrics
from kilolayer.runs.run import Run
from kilolayer.tasks.classify.config import ClassifyConfig
from kilolayer.training.loop import train
from tests.fixtures.small_classifiers import created, new_classifier, write_examples
from tests.fixtures.small_runs import task_of

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "understanding" / "glue.py"
HEADERS = {"RTE": "index\tsentence1\tsentence2\tlabel", "STS-B": "index\tsentence1\tsentence2\tscore"}


@pytest.fixture(scope="module")
def glue() -> ModuleType:
    spec = importlib.util.spec_from_file_location("glue_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GLUE's files from made sentences, and a run to start from."""
    folder = write_examples(tmp_path_factory.mktemp("examples"))
    for part, name in (("train", "train"), ("valid", "dev")):
        rows = [line.split("\t") for line in (folder / f"{part}.tsv").read_text().splitlines()[1:]]
        texts = {
            "RTE": [f"{index}\t{a}\t{b}\t{label}" for index, (a, b, label, _) in enumerate(rows)],
            "STS-B": [f"{index}\t{a}\t{b}\t{score}" for index, (a, b, _, score) in enumerate(rows)],
            "CoLA": [f"x\t{int(label == 'good')}\t\t{a}" for a, _, label, _ in rows],
        }
        for task, lines in texts.items():
            lines = [HEADERS[task], *lines] if task in HEADERS else lines
            (folder / f"{task}.{name}.tsv").write_text("".join(f"{line}\n" for line in lines))
    run = new_classifier(folder / "start", folder, model={"dropout": 0.0}, train={"steps": 2})
    assert train(run, task_of(run)) == 0
    return folder


def options(folder: Path, out: Path, **others: Any) -> list[str]:
    given = {"data": folder, "out": out, "device": "cpu", "rows": 8, "length": 70, "epochs": 2, "dropout": 0.1} | others
    return [str(folder / "start"), *(word for name, value in given.items() for word in (f"--{name}", str(value)))]


@pytest.mark.slow
def test_all_tasks_that_are_there_are_fine_tuned_and_what_is_done_is_not_done_again(
    glue: ModuleType, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "glue.json"
    words = options(folder, out, tasks="CoLA,STS-B,MNLI", lrs="1e-2", seeds="1")
    glue.main(words)
    printed = capsys.readouterr().out
    document = json.loads(out.read_text())
    found = {(each["task"], each["lr"], each["seed"]): each for each in document["results"]}
    assert len(found) == len(document["results"]) == 2
    assert document["absent"] == ["MNLI"]
    for each in found.values():
        values = [epoch["metric"] for epoch in each["epochs"]]
        assert len(values) == 2
        assert (each["score"], each["best_epoch"]) == (max(values), values.index(max(values)) + 1)
    assert {each["metric"] for each in found.values()} == {"matthews", "pearson"}
    assert printed == out.with_suffix(".md").read_text()
    assert "| run | CoLA | STS-B | average |" in printed
    assert "MNLI" in printed
    monkeypatch.setattr(glue.Suite, "fine_tune", None)
    glue.main(words)
    assert capsys.readouterr().out == printed
    with pytest.raises(SystemExit, match="was made with layer_decay"):
        glue.main([*words, "--layer-decay", "0.9"])


@pytest.mark.slow
def test_a_fine_tuning_is_what_the_command_trains(glue: ModuleType, folder: Path, tmp_path: Path) -> None:
    parsed = glue._options(options(folder, tmp_path / "glue.json"))
    suite = glue.Suite(folder / "start", parsed)
    suite.fine_tune("RTE", 1e-2, 7)  # leaves no trace
    found = suite.fine_tune("RTE", 1e-2, 3)
    assert suite.fine_tune("RTE", 1e-2, 3)["epochs"] == found["epochs"]
    start = Run.open(folder / "start")
    table = {
        "task": "classify",
        "model": {"dropout": 0.1, "attention_dropout": 0.1, "head": {"dropout": 0.1}},
        "examples": {"glue": "RTE", "folder": str(folder), "rows": 8, "length": 70},
        "train": {"start_from": str(folder / "start"), "epochs": 2, "lr": 1e-2, "seed": 3, "device": "cpu"},
    }
    run = created(tmp_path / "run", merge(ClassifyConfig.from_start(start.config.table()), table), start.vocabulary())
    assert train(run, task_of(run)) == 0
    rows = [row for row in read_metrics(run.folder) if row["kind"] == "valid"]
    assert [{name: row[name] for name in found["epochs"][0]} for row in rows] == found["epochs"]


def test_the_table_has_the_best_rates_mean_over_seeds(glue: ModuleType) -> None:
    scores = {(1e-4, 1): 60.0, (1e-4, 2): 62.0, (1e-3, 1): 90.0, (1e-3, 2): 20.0}
    results = [{"run": "a", "task": "RTE", "lr": lr, "seed": seed, "score": score} for (lr, seed), score in scores.items()]
    results.append({"run": "a", "task": "CoLA", "lr": 1e-4, "seed": 1, "score": 41.0})
    lines = glue.table_of(results, ["RTE", "CoLA"]).splitlines()
    assert lines[0] == "| run | RTE | CoLA | average |"
    assert lines[2] == "| a | 61.0 ± 1.4 (0.0001) | 41.0 (0.0001, 1 of 2 seeds) | 51.0 |"
    results.append({"run": "a", "task": "RTE", "lr": 3e-4, "seed": 1, "score": 99.0})
    assert glue.table_of(results, ["RTE"]).splitlines()[2] == "| a | 61.0 ± 1.4 (0.0001) | 61.0 |"
    assert glue.table_of(results, ["RTE", "MRPC"]).splitlines()[2].endswith("| - | - |")
