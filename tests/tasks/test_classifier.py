"""A classifier is trained by the same loop: exact resume, epochs, the best epoch by the metric, a start from another run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from kilolayer.config import build, merge
from kilolayer.runs.metrics import read_metrics
from kilolayer.runs.run import Run, cache_folder, in_steps, prepare
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training.loop import train
from kilolayer.training.trainer import Trainer
from tests.fixtures.process_pool import ProcessPool
from tests.fixtures.small_classifiers import classify_table, created, new_classifier
from tests.fixtures.small_runs import last_checkpoint, stopped_and_resumed, task_of
from tests.training import shared_runs

VARIANTS: dict[str, dict[str, Any]] = {
    "pairs and numbers": {"examples": {"second": "b", "kind": "number", "label": "score"}},
    "rates by layer, mean": {
        "model": {"head": {"pool": "mean", "dropout": 0.2}},
        "train": {"layer_decay": 0.5, "layers_every": 2},
    },
    "bf16, experts": {"model": {"moe": {"experts": 4}}, "train": {"precision": "bf16", "layer_decay": 0.9}},
}


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    "variant", ["pairs and numbers", "rates by layer, mean", pytest.param("bf16, experts", marks=pytest.mark.slow)]
)
def test_three_steps_and_three_more_are_six_to_the_bit(
    tmp_path: Path, examples: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    whole, broken = (new_classifier(tmp_path / name, examples, **VARIANTS[variant]) for name in ("whole", "broken"))
    stopped_and_resumed(whole, broken, monkeypatch)


def test_epochs_are_told_in_steps_when_the_run_is_created(tmp_path: Path, examples: Path) -> None:
    table = classify_table(examples, examples={"rows": 8})
    table["train"] = {"epochs": 3, "device": "cpu", "log_every": 1}
    run = created(tmp_path / "run", table)
    # 70 examples are 9 batches of 8
    settings = run.config.train
    assert (settings.steps, settings.valid_every, settings.save_every, settings.warmup_steps) == (27, 9, 9, 2)
    assert Run.open(run.folder).config == run.config
    table["train"] |= {"accumulate": 2, "valid_every": 5, "epochs": 0.5, "warmup_share": 0.5}
    settings = created(tmp_path / "other", table).config.train
    assert (settings.steps, settings.valid_every, settings.save_every, settings.warmup_steps) == (2, 5, 4, 1)
    config = build(RunConfig, classify_table(examples) | {"train": {"epochs": 6}})
    settings = in_steps(config, prepare(config, cache_folder()), processes=3).train
    assert (settings.steps, settings.valid_every) == (18, 3)


def test_without_epochs_validations_and_checkpoints_come_every_thousand_steps(tmp_path: Path, examples: Path) -> None:
    table = classify_table(examples)
    table["train"] = {"steps": 50, "warmup_share": 0.1, "device": "cpu"}
    settings = created(tmp_path / "run", table).config.train
    assert (settings.steps, settings.valid_every, settings.save_every, settings.warmup_steps) == (50, 1000, 1000, 5)
    assert TrainConfig(steps=50).validates(50)
    assert not TrainConfig(steps=5000).validates(999)
    assert TrainConfig(steps=5000).validates(1000)
    assert TrainConfig(steps=5000).saves(3000)


@pytest.mark.parametrize("pool", ["first", pytest.param("mean", marks=pytest.mark.slow)])
def test_a_classifier_learns_and_its_best_epoch_by_the_metric_is_kept(tmp_path: Path, examples: Path, pool: str) -> None:
    sections = {"examples": {"metric": "matthews"}, "model": {"head": {"pool": pool, "dropout": 0.0}, "dropout": 0.0}}
    table = classify_table(examples, **sections)
    table["train"] = {"epochs": 12, "device": "cpu", "lr": 3e-3, "log_every": 100}
    run = created(tmp_path / "run", table)
    assert train(run, task_of(run)) == 0
    found = [row for row in read_metrics(run.folder) if row["kind"] == "valid"]
    assert [row["step"] for row in found] == list(range(9, 109, 9))
    values = [row["matthews"] for row in found]
    assert max(values) == 100.0
    run.score(task_of(run), torch.device("cpu"))
    scores = json.loads((run.folder / "scores.json").read_text())
    assert scores["weights"]["steps"] == [found[values.index(max(values))]["step"]]
    assert scores["test"]["metric"]["value"] > 80


def test_a_limited_validation_reads_all_classes_of_a_sorted_file(tmp_path: Path) -> None:
    for part in ("train", "valid", "test"):
        lines = [f"{word} film\t{label}" for label, word in enumerate(("dull", "warm")) for _ in range(40)]
        (tmp_path / f"{part}.tsv").write_text("\n".join(["a\tlabel", *lines]) + "\n")
    task = task_of(run := created(tmp_path / "run", classify_table(tmp_path)))
    trainer = Trainer(run, task)
    trainer.begin(None)
    limited, whole = (task.validate(trainer.model, most) for most in (20, 10**9))
    assert limited is not None
    assert whole is not None
    assert limited.loss == pytest.approx(whole.loss, abs=1e-6)  # of two sentences, each as often as the other
    assert limited.scores["accuracy"].value == whole.scores["accuracy"].value


def test_a_start_keeps_the_bodys_weights_and_has_a_new_head(tmp_path: Path, examples: Path) -> None:
    first = new_classifier(tmp_path / "first", examples, train={"steps": 2})
    assert train(first, task_of(first)) == 0
    start = {"start_from": str(first.folder), "seed": 5}
    numbers = {"kind": "number", "label": "score"}
    second = created(tmp_path / "second", classify_table(examples, examples=numbers, train=start), first.vocabulary())
    trainer = Trainer(second, task_of(second))
    trainer.begin(None)
    weights = last_checkpoint(first).model
    for name, tensor in trainer.model.state_dict().items():
        if name.startswith("head."):
            assert tensor.shape != weights[name].shape or not torch.equal(tensor, weights[name]) or not tensor.any()
        else:
            assert torch.equal(tensor, weights[name]), name


@pytest.mark.slow
def test_rates_by_layer_reach_experts_that_processes_share(tmp_path: Path, examples: Path) -> None:
    smooth: dict[str, Any] = {
        "model": {"dropout": 0.0, "moe": {"experts": 4, "every": 1}},
        "train": {"eps": 1e-3, "lr": 1e-2, "steps": 4, "layer_decay": 0.3},
    }
    one = new_classifier(tmp_path / "one", examples, **merge(smooth, {"train": {"accumulate": 2}}))
    even = new_classifier(tmp_path / "even", examples, **merge(smooth, {"train": {"accumulate": 2, "layer_decay": 1.0}}))
    two = new_classifier(tmp_path / "two", examples, **smooth)
    for run in (one, even):
        assert train(run, task_of(run)) == 0
    pool = ProcessPool(tmp_path)
    pool.run(shared_runs.train_or_resume, 2, two.folder, os.environ["KILOLAYER_CACHE"])
    pool.stop()
    expected, found, other = (last_checkpoint(run).model for run in (one, two, even))
    of_experts = [name for name in expected if ".experts." in name and ".blocks.0." in name]
    assert of_experts
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5, msg=name)
    assert not any(torch.allclose(other[name], expected[name], rtol=1e-4, atol=1e-5) for name in of_experts)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # the compiler warns about itself
@pytest.mark.parametrize("variant", ["pairs and numbers", "rates by layer, mean"])
def test_recorded_fine_tuning_follows_eager_fine_tuning(tmp_path: Path, examples: Path, variant: str) -> None:
    smooth: dict[str, Any] = {
        "model": {"dropout": 0.0, "activation": "gelu", "head": {"dropout": 0.0}},
        "train": {"steps": 40, "device": "cuda", "precision": "fp32", "lr": 1e-3, "valid_every": 20},
    }
    found = []
    for eager in (False, True):
        sections = merge(merge(VARIANTS[variant], smooth), {"train": {"eager": eager}})
        run = new_classifier(tmp_path / str(eager), examples, **sections)
        assert train(run, task_of(run)) == 0
        found.append([row["loss"] for row in read_metrics(run.folder) if row["kind"] in ("train", "valid")])
    assert found[0] == pytest.approx(found[1], rel=1e-3)
