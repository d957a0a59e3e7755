"""`kilolayer train --resume RUN` with other options, beyond the run's end, after an edit, and without its checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import kilolayer as kl
from kilolayer.cli.main import main
from kilolayer.runs import checkpoint
from kilolayer.runs.metrics import read_metrics
from kilolayer.training.loop import train
from tests.cli.typed_commands import quietly, refused
from tests.fixtures.small_runs import new_run, task_of
from tests.fixtures.small_runs import write_corpus as write_small_corpus


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, trained and scored."""
    folder = tmp_path_factory.mktemp("finished")
    options = {"steps": 4, "log_every": 2, "valid_every": 2, "save_every": 2, "keep": 9, "schedule": "linear"}
    run = new_run(folder / "run", write_small_corpus(folder), train=options)
    assert train(run, task_of(run)) == 0
    run.scores("cpu")
    return run.folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def times_of(run: Path) -> dict[Path, int]:
    return {each: each.stat().st_mtime_ns for each in run.rglob("*") if each.name != "lock"}


@pytest.mark.slow
@pytest.mark.parametrize("by", ["typed", "edited", "called"])
def test_a_finished_run_is_made_longer(run: Path, by: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "scores.json").read_bytes()
    if by == "edited":
        path = run / "config.toml"
        path.write_text(path.read_text().replace("steps = 4\n", "steps = 8\n", 1))
    if by == "called":
        assert kl.train(resume=run, train={"steps": 8}).config.train.steps == 8
        out, err = "BLEU ", capsys.readouterr().err
    else:
        code, out, err = quietly("train", "--resume", run, *(["--train.steps", "8"] if by == "typed" else []))
        assert code == 0, err
    assert (run / "scores.step-00000004.json").read_bytes() == before
    assert json.loads((run / "scores.json").read_text())["weights"]["steps"][-1] > 4
    assert "finished at step 4 and continues; its previous scores are kept in scores.step-00000004.json" in err
    # After a warm-up of 3 steps, linear over 8: at step 5 three fifths of 1e-2 are left.
    told = "from step 5 on, train.steps is 8 (was 4); the learning rate of step 5 is 0.006 (linear over 8 steps), instead of 0"
    assert told in err
    assert told in (run / "log.txt").read_text()
    (event,) = [row for row in read_metrics(run) if row["kind"] == "event"]
    assert (event["step"], event["text"], event["change"]) == (4, told, True)
    page = (run / "report.html").read_text()
    assert "From step 5 on, train.steps is 8 (was 4)" in page
    assert out.splitlines()[-1].startswith("BLEU ")
    code, _, err = quietly("train", "--resume", run)
    assert (code, "is finished, there is nothing to do" in err) == (0, True)
    assert checkpoint.step_of(checkpoint.steps(run / "checkpoints")[-1]) == 8
    shutil.rmtree(run / "checkpoints")
    code, _, err = quietly("train", "--resume", run)
    assert (code, "is finished, and cannot go on: the checkpoints of this run have been deleted" in err) == (0, True)


def test_an_edit_that_breaks_something_is_refused_with_all_names(run: Path) -> None:
    path = run / "config.toml"
    path.write_text(path.read_text().replace("dropout = 0.1\n", "dropout = 0.2\n", 1).replace("seed = 1\n", "seed = 5\n", 1))
    before = times_of(run)
    lines = refused("train", "--resume", run)
    assert "model.dropout and train.seed cannot change in a run that has begun" in lines[0]
    assert str(path) in lines[1]
    assert "model.dropout is 0.2 (was 0.1); train.seed is 5 (was 1)" in lines[1]
    assert times_of(run) == before


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    ("typed", "what", "fix"),
    [
        (["--train.steps", "3"], "train.steps is 3, but the run has already taken 4", "set it to more than 4"),
        (["--train.seed", "3"], "train.seed cannot change in a run that has begun", "--train.start_from"),
        (["--model.dim", "32"], "model.dim cannot change", "--train.start_from"),
        (["--train.epochs", "3"], "a run that has begun counts steps: set train.steps", "leave it"),
        (["--train.setps", "30"], "did you mean 'steps'", "valid: "),
        (["--train.steps", "many"], "steps is 'many'", "a whole number"),
        (["--train.keep", "3"], "finished at step 4, and there is nothing left to do with these options", "--train.steps 8"),
        (["--train.keep", "1", "--train.average", "3"], "only the newest 1 checkpoints are kept", "raise keep"),
        (["--run", "runs/other"], "--resume takes no configuration and no --run", "--train.steps 20000"),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused_and_nothing_is_changed(
    run: Path, typed: list[str], what: str, fix: str
) -> None:
    before = times_of(run)
    code, out, err = quietly("train", "--resume", run, *typed)
    lines = err.splitlines()
    assert (code, out) == (2, "")
    assert what in lines[0]
    assert fix in lines[-1]
    assert times_of(run) == before


def test_the_help_lists_what_may_change(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "how long it trains, and at which learning rate: train.steps" in shown


def test_checkpoints_that_are_gone_are_told_by_every_verb(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    code, out, err = quietly("evaluate", run)
    assert (code, "BLEU" in out, "the checkpoints of this run have been deleted" in err) == (0, True, True)
    verbs: list[list[object]] = [["translate", run], ["train", "--resume", run, "--train.steps", "8"], ["diagnose", run]]
    verbs += [["surface", run], ["surface", run, "--trajectory"], ["evaluate", run, "--test", "valid"]]
    for words in verbs:
        code, _, err = quietly(*words)
        assert code == 2, words
        lines = err.splitlines()[-3:]
        assert "the checkpoints of this run have been deleted; the last one was of step 4" in lines[0], words
        assert str(run / "checkpoints") in lines[1]
        assert "restore them" in lines[2]
