"""A task in a user's file that brings a torch module of its own: what has a meaning for it works, the rest is refused."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import kilolayer as kl
from kilolayer.cli.main import main
from kilolayer.config import build
from kilolayer.errors import InputError, OptionError
from kilolayer.tasks.config import RunConfig

PAGE = (Path(__file__).parents[2] / "docs/tasks.md").read_text()
TINY: dict[str, Any] = {"steps": 200, "lr": 0.01, "warmup_steps": 5, "device": "cpu", "threads": 1, "valid_every": 200}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The two files of the page, in a folder on the path."""
    folder = tmp_path_factory.mktemp("spirals")
    for language, suffix in (("python", "py"), ("toml", "toml")):
        (found,) = [each for each in re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL) if '"spirals:' in each]
        (folder / f"spirals.{suffix}").write_text(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder
    sys.modules.pop("spirals", None)


@pytest.fixture(scope="module")
def trained(folder: Path) -> Any:
    return kl.train(folder / "spirals.toml", run=folder / "run", train=TINY)


def test_it_learns_and_is_loaded(trained: Any) -> None:
    assert trained.scores()["test"]["accuracy"]["value"] > 0.8
    model = kl.load(trained.folder).model
    assert type(model).__name__ == "Network"
    assert model.config.width == 64
    assert not model.training
    loaded = load_file(trained.folder / "checkpoints/step-00000200/model.safetensors")
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())


def test_its_log_and_report_name_it(trained: Any) -> None:
    assert "a network of two hidden layers, 0.00 M parameters" in (trained.folder / "log.txt").read_text()
    page = (trained.folder / "report.html").read_text()
    assert "a network of two hidden layers" in page
    assert "accuracy" in page.lower()


def test_its_initial_weights_come_from_the_seed_and_leave_the_generator_alone(folder: Path) -> None:
    config = build(RunConfig, {"task": "spirals:SpiralTask"}).model
    before = torch.get_rng_state()
    one, same, other = (kl.build_model(config, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    pairs = [(one.state_dict()[name], each) for name, each in same.state_dict().items()]
    assert all(torch.equal(*pair) for pair in pairs)
    assert not torch.equal(one.state_dict()["output.weight"], other.state_dict()["output.weight"])


def test_resumed_it_goes_on_as_if_it_had_not_stopped(folder: Path, tmp_path: Path) -> None:
    whole = kl.train(folder / "spirals.toml", run=tmp_path / "whole", train={**TINY, "steps": 20})
    kl.train(folder / "spirals.toml", run=tmp_path / "parts", train={**TINY, "steps": 10})
    parts = kl.train(resume=tmp_path / "parts", train={"steps": 20})
    for file in ("model", "optimizer"):
        theirs, ours = (load_file(run.folder / f"checkpoints/step-00000020/{file}.safetensors") for run in (whole, parts))
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_it_has_a_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder / "spirals.toml"), "--model.width", "10", "--batch", "8", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    weights = (2 * 10 + 10) + (10 * 10 + 10) + (10 * 2 + 2)
    assert plan["parameters"] == {"total": weights, "active": weights, "parts": {"hidden": weights - 22, "output": 22}}
    assert plan["flops"]["forward_per_token"] == 2 * (2 * 10 + 10 * 10 + 10 * 2)
    # The points, and the output of each tanh.
    assert plan["training_memory"]["activations"] == 4 * 8 * (2 + 10 + 10)
    assert plan["training_memory"]["optimizer"] == 8 * weights
    assert main(["plan", str(folder / "spirals.toml")]) == 0
    shown = capsys.readouterr().out
    assert "forward, per point" in shown
    assert "recompute" not in shown
    assert main(["plan", str(folder / "spirals.toml"), "--precision", "bf16"]) == 2


def test_it_is_compared_by_options_of_its_own(folder: Path, trained: Any, tmp_path: Path) -> None:
    kl.train(folder / "spirals.toml", run=tmp_path / "narrow", model={"width": 4}, train=TINY)
    shown = str(kl.compare_runs([trained.folder, tmp_path / "narrow"]))
    assert "width" in shown
    assert "layers" not in shown
    assert "recipe" not in shown


def test_a_comparison_trains_it_and_refuses_recipes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    command = ["compare", str(folder / "spirals.toml"), "--out", str(tmp_path / "out"), "--train.steps", "5"]
    assert main([*command, "--recipes", "post_ln,deepnorm"]) == 2
    assert "model.recipe has no effect on the task 'spirals:SpiralTask'" in capsys.readouterr().err
    assert main([*command, "--layers", "6,12"]) == 2
    assert "model.layers has no effect on the task 'spirals:SpiralTask'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [("precision", "bf16"), ("layers_every", 5), ("layer_decay", 0.9), ("recompute", "layer"), ("stop_when_dead", True)],
)
def test_options_about_layers_are_refused(folder: Path, name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"{name} = .* has no effect on a teller of spirals, a model without known layers"):
        build(RunConfig, {"task": "spirals:SpiralTask", "train": {name: value}})


def test_what_is_about_layers_is_refused_with_the_reason(folder: Path, trained: Any, tmp_path: Path) -> None:
    for measured in (lambda: kl.diagnose(trained), lambda: kl.diagnose(folder / "spirals.toml")):
        with pytest.raises(
            InputError, match="a teller of spirals is a model of its task's own, without a known stack of layers"
        ):
            measured()
    with pytest.raises(InputError, match="without a known stack of layers to measure"):
        kl.forecast(folder / "spirals.toml")
    with pytest.raises(InputError, match="which no other software knows"):
        kl.export(trained, to="huggingface", out=tmp_path / "exported")
    with pytest.raises(OptionError, match="bf16"):
        kl.load(trained.folder, precision="bf16")
    with pytest.raises(InputError, match="not a Kilolayer model"):
        kl.save(trained.model, tmp_path / "saved")


def test_a_saved_transformer_is_no_start_for_it(folder: Path, tmp_path: Path) -> None:
    kl.save(kl.Encoder(layers=1, dim=8, heads=1, ffn_dim=8, vocab_size=8), tmp_path / "saved")
    with pytest.raises(InputError, match="cannot start from a saved model"):
        kl.train(folder / "spirals.toml", run=tmp_path / "run", train={**TINY, "start_from": str(tmp_path / "saved")})


def test_it_starts_from_a_run_of_its_own(folder: Path, trained: Any, tmp_path: Path) -> None:
    train = {**TINY, "steps": 1, "start_from": str(trained.folder)}
    started = kl.train(folder / "spirals.toml", run=tmp_path / "run", train=train)
    assert started.scores()["test"]["accuracy"]["value"] > 0.8


def test_the_surface_of_its_loss_is_plotted(folder: Path, tmp_path: Path) -> None:
    command = ["surface", str(folder / "spirals.toml"), "--size", "3", "--batches", "2", "--out", str(tmp_path)]
    assert main([*command, "--train.device", "cpu"]) == 0
    assert "a network of two hidden layers" in (tmp_path / "surface.html").read_text()
