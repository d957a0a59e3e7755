"""kilolayer surface, from end to end."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kilolayer import config as configuration
from kilolayer.cli.main import main
from kilolayer.errors import InputError
from kilolayer.probe.subject import training_loss
from kilolayer.runs.run import Run, choose_device
from kilolayer.training.loop import train
from tests.fixtures.small_runs import LAYERED, SMALL, new_run_of, task_of

QUICK = ["--size", "3", "--batches", "2", "--device", "cpu", "--json"]
CPU = choose_device("cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Run:
    """A language model with a checkpoint at each of four steps."""
    often = {"steps": 4, "save_every": 1, "keep": 10}
    run = new_run_of("causal_lm", tmp_path_factory.mktemp("run") / "small", corpus, train=often)
    assert train(run, task_of(run)) == 0
    return run


def surface(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code, output = main(["surface", *words]), capsys.readouterr()
    assert code == 0, output.err
    return json.loads(output.out)


def mean_loss(run: Run, chosen: Any = None) -> float:
    import torch

    with torch.no_grad():
        return float(training_loss(task_of(run), run.config.train.seed, 2)(run.load_model(CPU, chosen)))


def test_a_configuration_is_looked_at_on_its_own_device(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(_config: object, _task: object, device: object) -> None:
        raise InputError(f"the device is {device}")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("kilolayer.probe.subject.starting_model", stop)
    path = tmp_path / "small.toml"
    for own, typed, device in (("cpu", "auto", "cpu"), ("auto", "auto", "cuda"), ("cpu", "cuda", "cuda")):
        path.write_text(configuration.dump(SMALL["causal_lm"](corpus, train={"device": own})))
        assert main(["surface", str(path), "--size", "3", "--device", typed, "--out", str(tmp_path)]) != 0
        assert f"the device is {device}" in capsys.readouterr().err


def test_a_configuration_for_a_gpu_is_looked_at_on_the_cpu_where_this_is_asked_for(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    path = tmp_path / "small.toml"
    path.write_text(configuration.dump(SMALL["causal_lm"](corpus, train={"device": "cuda"})))
    words = ["surface", str(path), "--size", "3", "--batches", "1", "--out", str(tmp_path / "out")]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "there is no CUDA device" in told
    assert "--train.device cpu" in told
    assert not (tmp_path / "out").exists()
    assert main([*words, "--device", "cpu"]) == 0


def test_a_runs_surface_has_its_loss_in_the_middle(trained: Run, capsys: pytest.CaptureFixture[str]) -> None:
    found = surface(capsys, str(trained.folder), *QUICK, "--span", "0.5")
    assert found["x"] == [-0.5, 0.0, 0.5]
    assert found["loss"][1][1] == found["centre"] == pytest.approx(mean_loss(trained), rel=1e-6)
    assert len({value for row in found["loss"] for value in row}) == 9
    assert found["weights"] == [4]
    assert found["unit"] == "nats per token"
    assert found == json.loads((trained.folder / "surface.json").read_text())
    assert (trained.folder / "surface.html").exists()
    other = surface(capsys, str(trained.folder), *QUICK, "--span", "0.5", "--seed", "1")
    assert other["loss"] != found["loss"]
    assert other["loss"][1][1] == found["loss"][1][1]


def test_a_trajectory_begins_at_the_start_and_ends_at_the_last_checkpoint(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = surface(capsys, str(trained.folder), *QUICK, "--trajectory", "--out", str(tmp_path / "there"))
    assert found["steps"] == [0, 1, 2, 3, 4]
    assert found["path"][-1] == [0.0, 0.0]
    assert 0.5 < sum(found["explained"]) <= 1 + 1e-9
    assert found["end"] == pytest.approx(mean_loss(trained), rel=1e-6)
    assert {path.name for path in (tmp_path / "there").iterdir()} == {
        f"trajectory.{end}" for end in ("html", "json", "svg", "png")
    }


QUICKLY = ("classify", "translation")


@pytest.mark.matrix(4)
@pytest.mark.parametrize("task", [t if t in QUICKLY else pytest.param(t, marks=pytest.mark.slow) for t in LAYERED])
def test_a_configuration_of_any_task_has_a_surface(
    task: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = SMALL[task](corpus, model={"moe": {"experts": 2, "top_k": 1, "every": 1}})
    Path("mine.toml").write_text(configuration.dump(table))
    found = surface(capsys, "mine.toml", *QUICK, "--model.dim", "8")
    assert np.isfinite(np.array(found["loss"], dtype=float)).all()
    assert found["weights"] == [0]
    units = {"classify": "nats per example", "masked_lm": "nats per masked token", "classify_image": "nats per image"}
    units |= {"segment": "nats per pixel", "masked_image": "squared error per masked patch"}
    assert found["unit"] == units.get(task, "nats per token")
    assert sorted(os.listdir("surfaces/mine")) == [f"surface.{end}" for end in ("html", "json", "png", "svg")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["RUN", "--size", "4"], "odd number"),
        (["RUN", "--span", "0"], "above 0"),
        (["RUN", "--trajectory", "--span", "2"], "no effect with --trajectory"),
        (["RUN", "--trajectory", "--seed", "0"], "no effect with --trajectory"),
        (["RUN", "--model.dim", "8"], "--model.dim applies to a configuration"),
        (["RUN", "--sizes", "8"], "did you mean '--size'"),
        (["CONFIG", "--trajectory"], "no training path yet"),
        (["CONFIG", "--train.lrr", "1"], "did you mean 'lr'"),
        (["nowhere.toml"], "nowhere.toml"),
        (["FOLDER"], "not a run"),
    ],
)
def test_mistakes_are_told(
    words: list[str], said: str, trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], corpus: Path
) -> None:
    config = tmp_path / "mine.toml"
    config.write_text(configuration.dump(SMALL["causal_lm"](corpus)))
    places = {"RUN": str(trained.folder), "CONFIG": str(config), "FOLDER": str(tmp_path)}
    assert main(["surface", *(places.get(word, word) for word in words)]) == 2
    assert said in capsys.readouterr().err


def test_a_run_with_too_few_checkpoints_is_told_how_to_have_more(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run_of("causal_lm", tmp_path / "run", corpus, train={"steps": 1})
    assert train(run, task_of(run)) == 0
    assert main(["surface", str(run.folder), "--trajectory"]) == 2
    assert "--train.keep" in capsys.readouterr().err
