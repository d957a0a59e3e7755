"""`kilolayer train --resume RUN` with other options, beyond the run's end, after an edit, and without its checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typed_commands import quietly, refused

from kilolayer.cli.main import main
from kilolayer.config import load
from kilolayer.training import checkpoint
from kilolayer.training.metrics import read_metrics
from kilolayer.training.run import Run

# What is due every two steps is due at the end of the shorter run too: the longer one has the same rows and checkpoints.
EVEN = ["--train.schedule", "constant", "--train.keep", "9"]
EVEN += [word for name in ("log_every", "valid_every", "save_every", "layers_every") for word in (f"--train.{name}", "2")]


@pytest.fixture(scope="module")
def short(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four steps."""
    folder = tmp_path_factory.mktemp("runs") / "short"
    code, _, err = quietly("train", config, "--run", folder, *EVEN, "--train.steps", "4")
    assert code == 0, err
    return folder


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of eight steps."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    code, _, err = quietly("train", config, "--run", folder, *EVEN, "--train.steps", "8")
    assert code == 0, err
    return folder


@pytest.fixture
def run(short: Path, tmp_path: Path) -> Path:
    return shutil.copytree(short, tmp_path / "run")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    times = ("seconds", "tokens_per_second")
    rows = [row for row in read_metrics(folder) if row["kind"] != "event"]
    return [{name: value for name, value in row.items() if name not in times} for row in rows]


def assert_alike(longer: Path, whole: Path) -> None:
    """Weights, moments and random state to the bit, all rows of metrics, all scores, and the configuration."""
    paths, others = (checkpoint.steps(folder / "checkpoints") for folder in (longer, whole))
    assert [path.name for path in paths] == [path.name for path in others]
    for path, other in zip(paths, others, strict=True):
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert (path / name).read_bytes() == (other / name).read_bytes()
    states = [{**checkpoint.load_state(each[-1]), "seconds": 0} for each in (paths, others)]
    assert states[0] == states[1]
    assert rows_of(longer) == rows_of(whole)
    assert (longer / "scores.json").read_bytes() == (whole / "scores.json").read_bytes()
    assert (longer / "config.toml").read_bytes() == (whole / "config.toml").read_bytes()


def test_a_finished_run_made_longer_is_the_run_that_was_so_long(run: Path, whole: Path) -> None:
    before = (run / "scores.json").read_bytes()
    code, out, err = quietly("train", "--resume", run, "--train.steps", "8")
    assert code == 0, err
    assert_alike(run, whole)
    assert (run / "scores.step-00000004.json").read_bytes() == before
    assert "finished at step 4 and goes on; its scores so far are kept in scores.step-00000004.json" in err
    told = "from step 5 on train.steps is 8, and was 4; the learning rate stays what it would have been, 0.01 at step 5"
    assert told in err
    assert told in (run / "log.txt").read_text()
    (event,) = [row for row in read_metrics(run) if row["kind"] == "event"]
    assert (event["step"], event["text"], event["change"]) == (4, told, True)
    page = (run / "report.html").read_text()
    assert "From step 5 on train.steps is 8, and was 4" in page
    assert out.splitlines()[-1].startswith("BLEU ")
    code, _, err = quietly("train", "--resume", run)
    assert (code, "is finished: nothing to do" in err) == (0, True)


def test_an_edit_of_the_number_of_steps_is_obeyed_and_named(run: Path, whole: Path) -> None:
    path = run / "config.toml"
    path.write_text(path.read_text().replace("steps = 4\n", "steps = 8\n", 1))
    assert load(path)["train"]["steps"] == 8
    code, _, err = quietly("train", "--resume", run)
    assert code == 0, err
    assert "train.steps is 8, and was 4" in err
    assert_alike(run, whole)


def test_an_unfinished_run_is_made_longer_too_and_a_falling_rate_says_what_it_does(run: Path, tmp_path: Path) -> None:
    (run / "scores.json").unlink()
    code, _, err = quietly(
        "train", "--resume", run, "--train.steps", "6", "--train.schedule", "linear", "--train.device", "cpu"
    )
    assert code == 0, err
    # After a warm-up of 3 steps, linear over 6: at step 5 one third of 1e-2 is left.
    assert "train.schedule is 'linear', and was 'constant'; the learning rate of step 5 is 0.00333 (linear over 6 steps)" in err
    assert "and would be 0.01" in err
    assert "scores.step" not in err
    assert checkpoint.step_of(checkpoint.steps(run / "checkpoints")[-1]) == 6


def test_an_edit_that_breaks_something_is_refused_with_all_names(run: Path) -> None:
    path = run / "config.toml"
    path.write_text(path.read_text().replace("dropout = 0.1\n", "dropout = 0.2\n", 1).replace("seed = 1\n", "seed = 5\n", 1))
    before = {each: each.stat().st_mtime_ns for each in run.rglob("*") if each.name != "lock"}
    lines = refused("train", "--resume", run)
    assert "model.dropout and train.seed cannot change in a run that has begun" in lines[0]
    assert str(path) in lines[1]
    assert "model.dropout is 0.2, and was 0.1; train.seed is 5, and was 1" in lines[1]
    assert {each: each.stat().st_mtime_ns for each in run.rglob("*") if each.name != "lock"} == before


@pytest.mark.parametrize(
    ("typed", "what", "fix"),
    [
        (["--train.steps", "3"], "train.steps is 3, and the run has taken 4", "set more than 4"),
        (["--train.seed", "3"], "train.seed cannot change in a run that has begun", "--train.start_from"),
        (["--model.dim", "32"], "model.dim cannot change", "--train.start_from"),
        (["--train.epochs", "3"], "a run that has begun counts steps: set train.steps", "leave it"),
        (["--train.setps", "30"], "did you mean 'steps'", "valid: "),
        (["--train.steps", "many"], "steps is 'many'", "a whole number"),
        (["--train.keep", "3"], "finished at step 4, and these options leave it nothing to do", "--train.steps 8"),
        (["--train.keep", "1", "--train.average", "3"], "only 1 checkpoints are kept", "raise keep"),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused_and_nothing_is_changed(
    run: Path, typed: list[str], what: str, fix: str
) -> None:
    before = {each: each.stat().st_mtime_ns for each in run.rglob("*") if each.name != "lock"}
    lines = refused("train", "--resume", run, *typed)
    assert what in lines[0]
    assert fix in lines[2]
    assert {each: each.stat().st_mtime_ns for each in run.rglob("*") if each.name != "lock"} == before


def test_the_help_lists_what_may_change(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert "how long it trains, and at which learning rate: train.steps" in shown


def test_a_run_that_no_longer_got_better_asks_for_more_patience(run: Path) -> None:
    path = checkpoint.steps(run / "checkpoints")[-1]
    state = checkpoint.load_state(path)
    state["best"]["waited"] = 2
    found = checkpoint.load(path)
    checkpoint.save(run / "checkpoints", checkpoint.Checkpoint(4, found.model, found.optimizer, state))
    lines = refused("train", "--resume", run, "--train.steps", "8", "--train.patience", "2")
    assert "no validation was better" in lines[0]


def lose_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def test_a_finished_run_without_checkpoints_says_so_in_every_verb(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_checkpoints(run)
    code, out, err = quietly("train", "--resume", run)
    assert code == 0
    assert "nothing to do; the checkpoints of this run are gone; the last one was of step 4" in err
    assert "weights" not in err
    assert "BLEU" in out
    code, _, err = quietly("evaluate", run)
    assert code == 0
    assert "the checkpoints of this run are gone" in err
    verbs = [["translate", run], ["train", "--resume", run, "--train.steps", "8"], ["diagnose", run]]
    verbs += [["surface", run], ["surface", run, "--trajectory"]]
    for words in verbs:
        code, _, err = quietly(*words)
        assert code == 2, words
        lines = err.splitlines()[-3:]
        assert "the checkpoints of this run are gone; the last one was of step 4" in lines[0], words
        assert str(run / "checkpoints") in lines[1]
        assert "put them back" in lines[2]


def test_an_unfinished_run_without_checkpoints_is_not_begun_anew(run: Path) -> None:
    (run / "scores.json").unlink()
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    rows = (run / "metrics.jsonl").read_bytes()
    lines = refused("train", "--resume", run)
    assert "the checkpoints of this run are gone; the last one was of step 4" in lines[0]
    assert (run / "metrics.jsonl").read_bytes() == rows
    # A run of a version that did not note it begins anew, and says how far it had come.
    (run / "last_checkpoint.json").unlink()
    code, _, err = quietly("train", "--resume", run)
    assert code == 0
    assert "the run starts from the beginning, though it had reached step 4" in err


def test_a_newest_checkpoint_that_was_deleted_is_named(run: Path) -> None:
    shutil.rmtree(checkpoint.steps(run / "checkpoints")[-1])
    (run / "scores.json").unlink()
    code, _, err = quietly("evaluate", run)
    assert code == 0
    assert "checkpoint of step 4 is missing, and it is the newest; in its place the weights of step 2 are used" in err
    assert json.loads((run / "scores.json").read_text())["weights"]["passed_over"] == [4]
    code, _, err = quietly("train", "--resume", run)
    assert code == 0
    assert "the checkpoint of step 4 is gone: the run goes on from that of step 2" in err
    assert json.loads((run / "scores.json").read_text())["weights"]["passed_over"] == []


def test_moved_data_are_found_where_they_are_said_to_be(run: Path, config: Path, tmp_path: Path, whole: Path) -> None:
    moved = shutil.copytree(config.parent, tmp_path / "moved")
    code, _, err = quietly("train", "--resume", run, "--train.steps", "8", "--data.folder", moved)
    assert code == 0, err
    assert Run.open(run).config.table()["data"]["folder"] == str(moved)
    paths = [checkpoint.steps(folder / "checkpoints")[-1] for folder in (run, whole)]
    assert paths[0].joinpath("model.safetensors").read_bytes() == paths[1].joinpath("model.safetensors").read_bytes()
    (moved / "train.en").write_text("".join(reversed((moved / "train.en").read_text().splitlines(keepends=True))))
    assert "pairs" in refused("train", "--resume", run, "--train.steps", "9")[0]
