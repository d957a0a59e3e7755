"""kilolayer compare, as a user types it, with real runs; in the quick tests, forked from a process that has torch."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest
import torch

from kilolayer.cli.main import main
from kilolayer.compare import queue
from kilolayer.compare.comparison import Comparison
from kilolayer.config import dump
from kilolayer.runs.run import Run
from tests.cli.typed_commands import quietly, refused
from tests.fixtures.fork_server import SERVER
from tests.fixtures.small_runs import text_table, write_corpus
from tests.fixtures.undrawn_charts import undrawn_charts


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    corpus = write_corpus(tmp_path_factory.mktemp("corpus"))
    path = corpus / "small.toml"
    path.write_text(dump(text_table(corpus, train={"steps": 12, "valid_every": 6})))
    return path


class Forked:
    """Stands for the process of a run, with the same words."""

    def __init__(self, command: list[str], *, stdout: IO[bytes], cwd: Path, **_: object) -> None:
        words = command[command.index("train") :]
        self._process = SERVER.Process(target=_train, args=(words, stdout.name, cwd))
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode


def _train(words: list[str], log: str, cwd: Path) -> None:
    torch.set_num_threads(1)
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(cwd)
    with undrawn_charts():
        sys.exit(main(words))


@pytest.fixture(scope="module")
def compared(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    folder = tmp_path_factory.mktemp("compared") / "out"
    forks = SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue, "subprocess", forks)
        code, out, err = quietly("compare", config, "--recipes", "pre_ln,post_ln", "--out", folder, "--train.lr=0.02")
    assert code == 0, err
    return folder, out, err


def test_two_runs_are_trained_and_shown(compared: tuple[Path, str, str]) -> None:
    folder, out, err = compared
    assert "bits per byte, test" in out
    assert "pre_ln: started" in err
    assert f"page: {folder / 'comparison.html'}" in err
    document = json.loads((folder / "comparison.json").read_text())
    assert [(run["name"], run["outcome"]["step"]) for run in document["runs"]] == [("pre_ln", 12), ("post_ln", 12)]
    for name in ("pre_ln", "post_ln"):
        run = Run.open(folder / "runs" / name)
        assert (run.config.model.recipe.name, run.config.train.lr, run.config.train.steps) == (name, 0.02, 12)
        assert (run.folder / "scores.json").exists()
    assert (folder / "comparison.html").read_text().startswith("<!DOCTYPE html>")


def test_a_finished_comparison_is_shown_again_without_training(compared: tuple[Path, str, str]) -> None:
    folder, out, _ = compared
    before = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*")}
    code, again, err = quietly("compare", folder)
    assert (code, again) == (0, out)
    assert "started" not in err
    assert {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*")} == before


def test_runs_that_exist_are_compared(compared: tuple[Path, str, str], tmp_path: Path) -> None:
    folder, _, _ = compared
    runs = sorted((folder / "runs").iterdir())
    code, out, _ = quietly("compare", *runs, "--out", tmp_path / "of", "--json")
    assert code == 0
    document = json.loads(out)
    whole = json.loads((folder / "comparison.json").read_text())
    told = {run["name"]: run["scores"]["test"]["bits_per_byte"]["value"] for run in whole["runs"]}
    assert {run["name"]: run["scores"]["test"]["bits_per_byte"]["value"] for run in document["runs"]} == told
    assert document["table"]["rows"] == "model.recipe"
    assert json.loads((tmp_path / "of" / "comparison.json").read_text()) == document


def test_mistakes_are_told_before_any_work(config: Path, compared: tuple[Path, str, str], tmp_path: Path) -> None:
    folder, run, out = compared[0], compared[0] / "runs" / "pre_ln", tmp_path / "out"
    new = ("compare", config, "--out", out)
    assert "there is nothing to compare" in refused(*new)[0]
    assert "did you mean 'pre_ln'" in refused(*new, "--recipes", "pre_lm")[0]
    assert "has no values" in refused(*new, "--set", "train.lr")[0]
    assert "there is only one run" in refused("compare", run)[0]
    assert "there is only one run" in refused("compare", run, run / ".")[0]
    assert "not a run folder" in refused("compare", folder / "runs")[0]
    assert "found no configuration" in refused("compare", tmp_path / "nowhere")[0]
    assert "a value of model.recipe is empty" in refused(*new, "--recipes", "pre_ln,")[0]
    assert "train.lr is both" in refused(*new, "--set", "train.lr=1e-3,2e-3", "--train.lr", "1")[0]
    assert "have no effect on existing runs" in refused("compare", run, folder / "runs" / "post_ln", "--seeds", "1")[0]
    assert "have no effect on the comparison" in refused("compare", folder, "--model.dim=8")[0]
    assert "did you mean '--recipes'?" in quietly(*new, "--recipe", "pre_ln")[2]
    assert "did you mean '--seeds'?" in quietly(*new, "--seed", "1")[2]
    assert not out.exists()


@pytest.mark.parametrize("verb", ["translate", "generate", "evaluate", "export", "report", "diagnose"])
def test_who_uses_a_comparison_as_a_run_is_shown_its_runs(verb: str, compared: tuple[Path, str, str], tmp_path: Path) -> None:
    folder = compared[0]
    more = {"export": ("--to", "huggingface", "--out", tmp_path / "exported")}.get(verb, ())
    told = "\n".join(refused(verb, folder, *more))
    assert "this is a comparison of runs, not a run" in told
    assert f"name one of its runs: {folder}/runs/post_ln, {folder}/runs/pre_ln" in told


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "kilolayer", "compare", *map(str, words)]


@pytest.mark.slow
def test_24_runs_killed_and_gone_on_with_are_those_that_were_never_disturbed(config: Path, tmp_path: Path) -> None:
    words = ("--recipes", "pre_ln,post_ln,deepnorm", "--layers", "1,2", "--set", "train.lr=0.01,0.02", "--seeds", "1,2")
    undisturbed = tmp_path / "undisturbed"
    assert subprocess.run(command(config, *words, "--out", undisturbed), check=False, capture_output=True).returncode == 0
    assert len(Comparison.open(undisturbed).members) == 24
    disturbed, generator = tmp_path / "disturbed", random.Random(3)
    # First a part of it, killed and stopped; the rest is asked for later.
    few = ("--recipes", "pre_ln,post_ln", "--layers", "1,2", "--set", "train.lr=0.01,0.02")
    arguments: tuple[object, ...] = (config, *few, "--out", disturbed)
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        with subprocess.Popen(command(*arguments), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and not (disturbed / "comparison.toml").exists():
                time.sleep(0.1)
            time.sleep(generator.uniform(5, 20))
            process.send_signal(number)
        arguments = (disturbed,)
    extended = command(disturbed, "--recipes", "deepnorm", "--seeds", "1,2")
    done = subprocess.run(extended, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [{_key(result.options): result for result in Comparison.open(each).results()} for each in (undisturbed, disturbed)]
    assert set(found[0]) == set(found[1])
    for key, whole in found[0].items():
        other = found[1][key]
        assert whole.outcome == other.outcome
        assert [row["loss"] for row in whole.valid] == [row["loss"] for row in other.valid]
        assert whole.scores["test"] == other.scores["test"]


def _key(options: dict[str, object]) -> str:
    return json.dumps(sorted(options.items()))
