"""An error that Python code meets names arguments of Python; the same error of the command names its flags."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kilolayer as kl
from kilolayer import hints
from kilolayer.cli.main import main
from kilolayer.config import dump
from kilolayer.errors import KilolayerError
from tests.fixtures.small_runs import SMALL, text_table
from tests.runs.run_by_command import refusal

Runs = dict[str, Path]


def without_checkpoints(runs: Runs, folder: Path) -> Path:
    copied = Path(shutil.copytree(runs["causal_lm"], folder / "copied"))
    shutil.rmtree(copied / "checkpoints")
    return copied


def two_configurations(runs: Runs, folder: Path, corpus: Path) -> Any:
    for dim in (8, 16):
        path = folder / f"{dim}.toml"
        path.write_text(dump(text_table(corpus, train={"steps": 1, "warmup_steps": 1}, model={"dim": dim})))
        kl.run_comparison(path, {"train.seed": [1]}, folder=folder / "compared")


CALLS: dict[str, tuple[Callable[[Runs, Path, Path], Any], str]] = {
    "no run": (lambda runs, folder, corpus: kl.load(folder), "name a folder that `kl.train` created"),
    "nothing left to train": (
        lambda runs, folder, corpus: kl.train(resume=runs["causal_lm"], train={"patience": 3}),
        'give it more steps: train={"steps": 8}; or score something else: `run.scores`',
    ),
    "another model": (
        lambda runs, folder, corpus: kl.train(resume=runs["causal_lm"], model={"dim": 8}),
        'weights of this one: train={"start_from": "',
    ),
    "checkpoints that are gone": (
        lambda runs, folder, corpus: kl.load(without_checkpoints(runs, folder)).model,
        'config.toml", run="runs/NAME")',
    ),
    "a format that cannot hold it": (
        lambda runs, folder, corpus: kl.export(runs["causal_lm"], to="ctranslate2", out=folder / "out"),
        'export it with to="huggingface"',
    ),
    "two files": (lambda runs, folder, corpus: kl.load(runs["classify"]).scores(["a", "b"]), "\ntest\n"),
    "an axis without values": (
        lambda runs, folder, corpus: kl.run_comparison(None, {"train.lr": []}, folder=folder / "out"),
        'give a list: {"train.lr": [1, 2]}',
    ),
    "a depth that is none": (
        lambda runs, folder, corpus: kl.run_comparison(None, {"layers": ["deep"]}, folder=folder / "out"),
        '6 for each stack, or "60-12" for encoder and decoder',
    ),
    "a comparison of another configuration": (
        lambda runs, folder, corpus: two_configurations(runs, folder, corpus),
        'choose another: folder="runs/NAME", or continue that one: kl.run_comparison("',
    ),
    "a list that is a text": (
        lambda runs, folder, corpus: kl.train(SMALL["translation"](corpus), run=folder / "r", data={"directions": "en-de"}),
        'directions = ["en-de"]',
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if "comparison" in name else name for name in CALLS]
)
def test_errors_of_python_name_arguments_of_python(name: str, trained: Runs, corpus: Path, tmp_path: Path) -> None:
    call, words = CALLS[name]
    with pytest.raises(KilolayerError) as refused:
        call(trained, tmp_path, corpus)
    assert words in str(refused.value)
    assert "--" not in str(refused.value).replace(str(tmp_path), "")
    assert "kilolayer " not in str(refused.value)
    assert "shell" not in str(refused.value)


def test_errors_of_the_command_name_flags(trained: Runs, corpus: Path, tmp_path: Path) -> None:
    assert "--train.steps 8; or score something else: `kilolayer evaluate`" in refusal(
        "train", "--resume", trained["causal_lm"], "--train.patience", "3"
    )
    assert "export it with --to huggingface" in refusal(
        "export", trained["causal_lm"], "--to", "ctranslate2", "--out", tmp_path / "out"
    )
    (tmp_path / "t.toml").write_text(dump(SMALL["translation"](corpus)))
    assert "in a shell with quotes" in refusal("train", tmp_path / "t.toml", "--data.directions", "en-de")


def test_a_hint_is_written_for_where_the_user_is() -> None:
    assert hints.call("train", "my.toml", run=Path("runs/mine")) == 'kl.train("my.toml", run="runs/mine")'
    assert hints.option("train.stop_when_dead", False) == 'train={"stop_when_dead": False}'
    assert hints.option("train.lr", 0.00025) == 'train={"lr": 2.5e-4}'
    numbers = {0.5: "0.5", 1.0: "1.0", 0.1 + 0.2: "0.30000000000000004", 1e-14: "1e-14", math.inf: "inf"}
    assert {value: hints.argument("at", value) for value in numbers} == {value: f"at={text}" for value, text in numbers.items()}
    assert hints.argument("out", 'a "b"') == "out='a \"b\"'"
    with hints.for_shell():
        assert hints.call("train", "my.toml", run=Path("runs/mine")).endswith("kilolayer train my.toml --run runs/mine")
        assert hints.option("train.stop_when_dead", False) == "--train.stop_when_dead false"
        assert hints.option("train.lr", 0.00025) == "--train.lr 2.5e-4"
        assert hints.flag("overwrite") == "--overwrite"
    assert hints.flag("overwrite") == "overwrite=True"


@pytest.mark.slow
def test_a_diagnosis_suggests_options_as_they_are_written_where_it_is_made(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.toml").write_text(dump(SMALL["translation"](corpus, train={"eps": 1e3})))
    (said,) = [line for line in str(kl.diagnose(tmp_path / "t.toml")).splitlines() if line.startswith("Try: ")]
    assert said.startswith('Try: train={"eps": 1e-')
    assert "--" not in said
    assert main(["diagnose", str(tmp_path / "t.toml")]) == 0
    (typed,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Try: ")]
    assert typed.startswith("Try: --train.eps 1e-")
    assert "{" not in typed
