"""A run that is made longer, or goes on with other options: to the bit the run that was so from the start."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kilolayer.config import load
from kilolayer.errors import InputError
from kilolayer.parallel.processes import Processes
from kilolayer.runs import checkpoint, resume
from kilolayer.runs.begin import data_of, old_run
from kilolayer.runs.chosen import choose
from kilolayer.runs.run import Run
from kilolayer.training.loop import train
from kilolayer.training.step import Stepper
from tests.fixtures.process_pool import ProcessPool
from tests.fixtures.small_runs import SMALL, new_run_of, record, stop_after, task_of
from tests.training import shared_runs

# What is due every two steps is due at the end of the shorter run too: the longer one has the same rows and checkpoints.
EVEN = {"log_every": 2, "valid_every": 2, "save_every": 2, "keep": 9, "schedule": "constant", "warmup_steps": 2}
SCORES = '{"test": {}}'


def made(task: str, folder: Path, corpus: Path, steps: int, **options: Any) -> Run:
    """A finished run of so many steps; its scores are made up."""
    run = new_run_of(task, folder, corpus, train={**EVEN, "steps": steps, **options})
    assert train(run, task_of(run)) == 0
    (folder / "scores.json").write_text(SCORES)
    return run


def resume_run(folder: Path, code: int = 0, **over: dict[str, Any]) -> Run:
    """What `train --resume` does before it scores."""
    with old_run(folder, over) as run:
        assert train(run, task_of(run), resume=True) == code
    return run


def comparable(run: Run) -> dict[str, Any]:
    found = record(run)
    return {**found, "metrics": [row for row in found["metrics"] if row["kind"] != "event"]}


@pytest.fixture(scope="module")
def short(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("translation", tmp_path_factory.mktemp("short") / "run", corpus, 4).folder


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return comparable(made("translation", tmp_path_factory.mktemp("whole") / "run", corpus, 8))


@pytest.fixture
def run(short: Path, tmp_path: Path) -> Path:
    return shutil.copytree(short, tmp_path / "run")


@pytest.mark.matrix(8)
@pytest.mark.parametrize("schedule", ["constant", "inverse_sqrt"])
@pytest.mark.parametrize("task", SMALL)
def test_a_run_made_longer_is_the_run_that_was_so_long(tmp_path: Path, corpus: Path, task: str, schedule: str) -> None:
    longer = made(task, tmp_path / "longer", corpus, 4, schedule=schedule).folder
    expected = comparable(made(task, tmp_path / "whole", corpus, 8, schedule=schedule))
    torch.manual_seed(12345)  # nothing may come from the process that goes on
    assert comparable(resume_run(longer, train={"steps": 8})) == expected
    assert (longer / "config.toml").read_bytes() == (tmp_path / "whole" / "config.toml").read_bytes()
    assert (longer / "scores.step-00000004.json").read_text() == SCORES
    assert not (longer / "scores.json").exists()


class Killed(BaseException):
    """As by kill -9: nothing is saved on the way out."""


@pytest.mark.slow
def test_killed_after_it_was_made_longer_it_goes_on_to_the_new_end(
    run: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    take, taken = Stepper.step, 0

    def die(*arguments: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken == 2:
            raise Killed
        return take(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "step", die)
        with pytest.raises(Killed):
            resume_run(run, train={"steps": 8})
    assert checkpoint.step_of(checkpoint.steps(run / "checkpoints")[-1]) == 4
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        resume_run(run, code=143)
    found = resume_run(run)
    assert comparable(found) == whole
    events = [row["text"] for row in record(found)["metrics"] if row["kind"] == "event"]
    assert len(events) == 1  # it was told in each life and is written once
    assert "train.steps is 8 (was 4)" in events[0]


@pytest.mark.slow
@pytest.mark.parametrize("point", ["before", "after"])
def test_killed_as_the_configuration_is_written_it_is_the_old_one_or_the_new_one(
    run: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    real = resume.write

    def die(path: Path, content: str) -> None:
        if point == "after":
            real(path, content)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(resume, "write", die)
        with pytest.raises(Killed):
            resume_run(run, train={"steps": 8})
    assert load(run / "config.toml")["train"]["steps"] == (4 if point == "before" else 8)
    found = resume_run(run, train={"steps": 8}) if point == "before" else resume_run(run)
    assert comparable(found) == whole


KILL = """
import os, signal, sys
from pathlib import Path
from kilolayer.cli.main import main
from kilolayer.files import writing
real = os.replace
def replace(a, b):
    if Path(b).name == sys.argv[2]:
        if sys.argv[3] == "after": real(a, b)
        os.kill(os.getpid(), signal.SIGKILL)
    real(a, b)
os.replace = replace
main(["train", "--resume", sys.argv[1], "--train.steps", "8"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("point", ["before", "after"])
@pytest.mark.parametrize("name", ["scores.step-00000004.json", "config.toml"])
def test_killed_by_a_signal_as_it_is_made_longer_nothing_is_lost(
    run: Path, whole: dict[str, Any], name: str, point: str
) -> None:
    words = [sys.executable, "-c", KILL, str(run), name, point]
    done = subprocess.run(words, check=False, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL, done.stderr
    Run.open(run)
    assert (run / "scores.json").exists() or (run / "scores.step-00000004.json").exists()
    assert comparable(resume_run(run, train={"steps": 8})) == whole


@pytest.mark.slow
def test_with_an_end_that_is_on_no_schedule_the_weights_are_still_the_same(
    corpus: Path, tmp_path: Path, whole: dict[str, Any]
) -> None:
    odd = made("translation", tmp_path / "odd", corpus, 3).folder
    found = comparable(resume_run(odd, train={"steps": 8}))
    assert (found["model"], found["optimizer"]) == (whole["model"], whole["optimizer"])
    assert 3 in [row["step"] for row in found["metrics"] if row["kind"] == "valid"]


OPTIONS: dict[str, dict[str, Any]] = {
    "train": {"log_every": 3, "valid_every": 3, "save_every": 5, "layers_every": 3, "keep": 2, "average": 2, "patience": 7}
    | {"stop_when_dead": True},
    "how": {"recompute": "layer", "threads": 1, "timeout": 60.0, "eager": True},
    "rate": {"lr": 1e-3, "schedule": "cosine", "min_lr": 1e-5, "warmup_steps": 1, "accumulate": 2},
}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("options", OPTIONS)
def test_options_that_may_change_do_and_the_checkpoint_tells_it(run: Path, options: str) -> None:
    found = resume_run(run, train={"steps": 6, **OPTIONS[options]})
    kept = load(run / "config.toml")["train"]
    assert {name: kept[name] for name in OPTIONS[options]} == OPTIONS[options]
    last = checkpoint.load_state(checkpoint.steps(found.checkpoints)[-1])
    assert last["config"] == (run / "config.toml").read_text()
    if options == "train":
        rows = record(found)["metrics"]
        assert [row["step"] for row in rows if row["kind"] == "train"] == [2, 4, 6]
        assert [row["step"] for row in rows if row["kind"] == "layers"] == [6]
        assert len(choose(found.checkpoints, found.config).steps) == 2


def test_what_is_typed_wins_over_what_the_run_says_beside_it(run: Path) -> None:
    with old_run(run, {"train": {"steps": 6, "schedule": "warmup_stable_decay", "decay_steps": 2}}) as first:
        assert first.config.train.decay_steps == 2
    with old_run(run, {"train": {"schedule": "constant"}, "search": {"beam": 3}}) as found:
        assert (found.config.train.schedule, found.config.train.decay_steps) == ("constant", 0)
        assert getattr(found.config, "search").method == "beam"  # noqa: B009


@pytest.mark.slow
def test_a_run_of_an_older_version_is_made_longer_too(run: Path, whole: dict[str, Any]) -> None:
    for path in checkpoint.steps(run / "checkpoints"):
        found = checkpoint.load(path)
        state = {name: value for name, value in found.state.items() if name != "config"}
        checkpoint.save(run / "checkpoints", checkpoint.Checkpoint(found.step, found.model, found.optimizer, state))
    (run / "last_checkpoint.json").unlink()
    assert comparable(resume_run(run, train={"steps": 8})) == whole


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_of_a_longer_run_falls_back_over_its_old_end(run: Path, whole: dict[str, Any]) -> None:
    resume_run(run, train={"steps": 8})
    for path in checkpoint.steps(run / "checkpoints")[1:]:
        (path / "state.json").write_text("{")
    assert comparable(resume_run(run)) == whole


@pytest.mark.slow
@pytest.mark.parametrize("task", SMALL)
def test_several_processes_make_a_run_longer(corpus: Path, tmp_path: Path, pool: ProcessPool, task: str) -> None:
    cache = os.environ["KILOLAYER_CACHE"]
    expected = new_run_of(task, tmp_path / "whole", corpus, train={**EVEN, "steps": 8})
    pool.run(shared_runs.train_or_resume, 2, expected.folder, cache)
    longer = new_run_of(task, tmp_path / "longer", corpus, train={**EVEN, "steps": 4})
    pool.run(shared_runs.train_or_resume, 2, longer.folder, cache)
    with old_run(longer.folder, {"train": {"steps": 8}}):
        pass
    pool.run(shared_runs.train_or_resume, 2, longer.folder, cache)
    assert comparable(Run.open(longer.folder)) == comparable(expected)


def test_a_finished_run_without_checkpoints_has_nothing_to_offer(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with old_run(run) as opened:
        assert data_of(opened, Processes()) is None
    assert 'train={"steps": 8} trains it longer' in capsys.readouterr().err
    shutil.rmtree(run / "checkpoints")
    with old_run(run) as opened:
        assert data_of(opened, Processes()) is None
    said = capsys.readouterr().err
    assert "is finished, and cannot go on: the checkpoints of this run have been deleted; the last one was of step 4" in said
    assert "weights" not in said

    def make_longer() -> None:
        resume_run(run, train={"steps": 8})

    for use in (lambda: choose(opened.checkpoints, opened.config), make_longer):
        with pytest.raises(
            InputError, match="the checkpoints of this run have been deleted; the last one was of step 4"
        ) as caught:
            use()
        assert caught.value.where == str(run / "checkpoints")
        assert "restore them" in caught.value.fix


def test_an_unfinished_run_without_checkpoints_is_not_begun_anew(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "scores.json").unlink()
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    rows = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match="the checkpoints of this run have been deleted"):
        resume_run(run)
    assert (run / "metrics.jsonl").read_bytes() == rows
    # A run of a version that did not note it begins anew, and says how far it had come.
    (run / "last_checkpoint.json").unlink()
    resume_run(run)
    assert "the run starts from the beginning, though it had reached step 4" in capsys.readouterr().err


def test_a_newest_checkpoint_that_was_deleted_is_named(
    run: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (run / "scores.json").unlink()
    shutil.rmtree(checkpoint.steps(run / "checkpoints")[-1])
    opened = Run.open(run)
    found = choose(opened.checkpoints, opened.config)
    assert (found.steps, found.passed_over) == ([2], [4])
    assert "checkpoint of step 4 is missing, and it is the newest" in caplog.text
    resume_run(run)
    assert "the checkpoint of step 4 has been deleted: the run continues from that of step 2" in capsys.readouterr().err
    assert choose(opened.checkpoints, opened.config).passed_over == []


def test_scores_are_kept_under_the_step_that_was_scored_where_its_checkpoint_was_deleted(run: Path) -> None:
    (run / "scores.step-00000002.json").write_text("{}")  # of a run that was made longer before
    shutil.rmtree(checkpoint.steps(run / "checkpoints")[-1])
    with old_run(run):
        pass
    assert (run / "scores.step-00000002.json").read_text() == "{}"
    assert (run / "scores.step-00000004.json").read_text() == SCORES


def test_a_run_that_is_refused_other_data_is_as_it_was(run: Path, corpus: Path, tmp_path: Path) -> None:
    other = shutil.copytree(corpus, tmp_path / "other")
    for path in other.glob("train.*"):
        path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    (run / "config.toml").write_text(f"# mine\n{(run / 'config.toml').read_text()}")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}
    for folder, what in ((other, "belongs to different data"), (tmp_path / "absent", "does not exist|no ")):
        with pytest.raises(InputError, match=what):
            resume_run(run, train={"steps": 8}, data={"folder": str(folder)})
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"} == before
    assert checkpoint.step_of(checkpoint.steps(resume_run(run, train={"steps": 5}).checkpoints)[-1]) == 5


@pytest.mark.slow
def test_moved_data_are_found_where_they_are_said_to_be(
    run: Path, corpus: Path, tmp_path: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(corpus, tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    found = resume_run(run, train={"steps": 8}, data={"folder": "moved"})
    assert found.config.table()["data"]["folder"] == str(tmp_path / "moved")
    assert comparable(found)["model"] == whole["model"]
    lines = (tmp_path / "moved" / "train.en").read_text().splitlines(keepends=True)
    (tmp_path / "moved" / "train.en").write_text("".join(reversed(lines)))
    with pytest.raises(InputError, match="other"):
        resume_run(run, train={"steps": 9})


@pytest.mark.slow
def test_an_evaluated_run_that_was_stopped_goes_on(run: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        resume_run(run, code=143, train={"steps": 8})
    (run / "scores.json").write_text(SCORES)  # as `evaluate` leaves it
    assert comparable(resume_run(run)) == whole
    assert (run / "scores.step-00000005.json").exists()


def test_a_run_that_no_longer_got_better_asks_for_more_patience(run: Path) -> None:
    path = checkpoint.steps(run / "checkpoints")[-1]
    found, state = checkpoint.load(path), checkpoint.load_state(path)
    state["best"]["waited"] = 2
    checkpoint.save(run / "checkpoints", checkpoint.Checkpoint(4, found.model, found.optimizer, state))
    with pytest.raises(InputError, match="were no better"):
        resume_run(run, train={"steps": 8, "patience": 2})
    resume_run(run, train={"steps": 5, "patience": 3})
