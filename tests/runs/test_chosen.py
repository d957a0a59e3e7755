"""Which checkpoints are used: the same after a stop, and never others without a word."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kilolayer.cli.main import main
from kilolayer.runs import checkpoint
from kilolayer.runs.run import Run
from kilolayer.training.loop import train
from tests.fixtures.small_runs import bytes_of, new_run, record, stop_after, task_of

CPU = torch.device("cpu")
AVERAGED: dict[str, Any] = {"steps": 8, "save_every": 2, "keep": 3, "average": 3}
BY_BEST: dict[str, Any] = {"steps": 6, "save_every": 3, "keep": 1, "valid_every": 2}


def damage(run: Run, step: int) -> str:
    """Flip a bit of a checkpoint's weights; the hash that they should have."""
    path = checkpoint.path_of(run.checkpoints, step)
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    return json.loads((path / "manifest.json").read_text())["files"]["model.safetensors"]["sha256"][0][:12]


def tensors_of(run: Run) -> dict[str, bytes]:
    """The weights that are used."""
    return {name: bytes_of(tensor) for name, tensor in run.load_model(CPU).state_dict().items()}


def weights_in(run: Run) -> dict[str, Any]:
    return json.loads((run.folder / "scores.json").read_text())["weights"]


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    "options",
    [AVERAGED, BY_BEST, {**BY_BEST, "save_best": False}, {**AVERAGED, "valid_every": 3}],
    ids=["average", "best", "newest", "average, and the best between"],
)
def test_a_stop_and_a_resume_change_neither_checkpoints_nor_weights_nor_scores(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    whole, broken = (new_run(tmp_path / name, corpus, train=options) for name in ("whole", "broken"))
    assert train(whole, task_of(whole)) == 0
    for steps in (1, 2, 2):  # after the steps 1, 3 and 5; of the validations, each second step, none is there yet
        with monkeypatch.context() as patch:
            stop_after(patch, steps)
            assert train(broken, task_of(broken), resume=True) == 143
    assert 5 in [checkpoint.step_of(path) for path in checkpoint.steps(broken.checkpoints)]
    assert train(broken, task_of(broken), resume=True) == 0
    assert record(broken) == record(whole)
    for run in (whole, broken):
        run.score(task_of(run), CPU)
    assert tensors_of(broken) == tensors_of(whole)
    for name in ("scores.json", "samples.json", "test.en-de.txt"):
        assert (broken.folder / name).read_bytes() == (whole.folder / name).read_bytes()
    kept = [checkpoint.steps(run.checkpoints) for run in (whole, broken)]
    assert [path.name for path in kept[0]] == [path.name for path in kept[1]]
    for ours, theirs in zip(*kept, strict=True):
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert (ours / name).read_bytes() == (theirs / name).read_bytes()


@pytest.mark.slow
def test_a_stop_on_the_step_of_the_best_validation_is_not_taken_for_the_best(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"steps": 6, "save_every": 6, "valid_every": 4, "save_best": False}
    whole, broken = (new_run(tmp_path / name, corpus, train=options) for name in ("whole", "broken"))
    train(whole, task_of(whole))
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        train(broken, task_of(broken))
    train(broken, task_of(broken), resume=True)
    assert tensors_of(broken) == tensors_of(whole)
    assert [path.name for path in broken.checkpoints.iterdir()] == ["step-00000006"]


@pytest.mark.slow
def test_a_damaged_member_of_a_mean_is_named_and_recorded(
    tmp_path: Path, corpus: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path / "run", corpus, train={**AVERAGED, "keep": 4})
    train(run, task_of(run))
    digest = damage(run, 6)
    run.score(task_of(run), CPU)
    assert len(caplog.messages) == 1
    for word in ("step 6", "model.safetensors", digest, "2, 4, 8"):
        assert word in caplog.messages[0]
    assert weights_in(run) == {"chosen": "average of 3", "steps": [2, 4, 8], "passed_over": [6]}
    paths = [checkpoint.path_of(run.checkpoints, step) for step in (2, 4, 8)]
    assert tensors_of(run) == {name: bytes_of(tensor) for name, tensor in checkpoint.average(paths).items()}
    assert main(["evaluate", str(run.folder)]) == 0
    assert "weights: average of 3, step 2, 4, 8; damaged or missing: step 6" in capsys.readouterr().out
    assert main(["evaluate", str(run.folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["weights"] == weights_in(run)
    assert main(["report", str(run.folder)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("gone", [4, 6])
def test_a_member_of_a_mean_that_is_gone_is_named_and_recorded(
    tmp_path: Path, corpus: Path, caplog: pytest.LogCaptureFixture, gone: int
) -> None:
    run = new_run(tmp_path / "run", corpus, train=AVERAGED)
    train(run, task_of(run))
    assert run.load_model(CPU) is not None
    assert not caplog.messages
    checkpoint.path_of(run.checkpoints, gone).rename(tmp_path / "away")
    assert train(run, task_of(run), resume=True) == 0
    run.score(task_of(run), CPU)
    left = [step for step in (4, 6, 8) if step != gone]
    assert len(caplog.messages) == 1
    for word in (f"step {gone} is missing", f"step {left[0]}, {left[1]} are used"):
        assert word in caplog.messages[0]
    assert weights_in(run) == {"chosen": "average of 3", "steps": left, "passed_over": [gone]}


@pytest.mark.slow
def test_a_damaged_checkpoint_that_no_undisturbed_run_has_is_not_missed(
    tmp_path: Path, corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"steps": 6, "lr": 3.0, "valid_every": 1, "save_every": 6, "save_best": False}
    run = new_run(tmp_path / "run", corpus, train=options)
    train(run, task_of(run))
    newest = checkpoint.path_of(run.checkpoints, 6)
    best = checkpoint.load_state(newest)["best"]["step"]
    assert best < 6
    shutil.copytree(newest, checkpoint.path_of(run.checkpoints, best))
    damage(run, best)
    run.score(task_of(run), CPU)
    assert not caplog.messages
    assert weights_in(run) == {"chosen": "newest", "steps": [6], "passed_over": []}


def test_without_the_best_checkpoint_the_newest_is_used_and_no_other_is_kept_beside_the_last_ones(
    tmp_path: Path, corpus: Path
) -> None:
    options = {"steps": 6, "lr": 3.0, "valid_every": 1, "save_every": 1, "keep": 2, "save_best": False}
    run = new_run(tmp_path / "run", corpus, train=options)
    train(run, task_of(run))
    assert [checkpoint.step_of(path) for path in checkpoint.steps(run.checkpoints)] == [5, 6]
    assert checkpoint.load_state(checkpoint.path_of(run.checkpoints, 6))["best"]["step"] < 5
    run.score(task_of(run), CPU)
    assert weights_in(run) == {"chosen": "newest", "steps": [6], "passed_over": []}


@pytest.mark.matrix(2)
@pytest.mark.parametrize("kind", ["damaged", "missing"])
def test_a_best_checkpoint_that_cannot_be_used_is_named_and_recorded(
    tmp_path: Path, corpus: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    run = new_run(tmp_path / "run", corpus, train={"steps": 6, "lr": 3.0, "valid_every": 1, "save_every": 6})
    train(run, task_of(run))
    best = checkpoint.load_state(checkpoint.path_of(run.checkpoints, 6))["best"]["step"]
    assert best < 6
    assert run.load_model(CPU) is not None
    assert not caplog.messages
    path = checkpoint.path_of(run.checkpoints, best)
    words = [f"step {best} is {kind}", "step 6 are used"]
    if kind == "damaged":
        words += ["model.safetensors", damage(run, best)]
    else:
        path.rename(tmp_path / "away")
    run.score(task_of(run), CPU)
    assert len(caplog.messages) == 1
    for word in words:
        assert word in caplog.messages[0]
    assert weights_in(run) == {"chosen": "newest", "steps": [6], "passed_over": [best]}


def test_a_stopped_run_without_a_regular_checkpoint_is_used_as_it_is(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run(tmp_path / "run", corpus, train=AVERAGED)
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        train(run, task_of(run))
    expected = checkpoint.load(checkpoint.path_of(run.checkpoints, 1)).model
    assert tensors_of(run) == {name: bytes_of(tensor) for name, tensor in expected.items()}
    assert not caplog.messages
