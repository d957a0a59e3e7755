"""A resumed run must have the same validation set; a test set that has changed is reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kilolayer.errors import InputError
from kilolayer.runs import checkpoint
from kilolayer.runs.begin import old_run
from kilolayer.runs.metrics import read_metrics
from kilolayer.runs.run import Run
from kilolayer.tasks.causal_lm.task import CausalLMTask
from kilolayer.tasks.task import Task
from kilolayer.training.loop import train
from tests.fixtures.small_runs import SMALL, new_run_of, stop_after, task_of

TOLD = "from step 4 on, the test set has changed: the data in the files are different"


def stopped(task: str, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, valid_every: int = 2) -> Run:
    """A run that has taken three of six steps, on a corpus of its own."""
    own = shutil.copytree(corpus, tmp_path / "corpus")
    run = new_run_of(task, tmp_path / "run", own, train={"valid_every": valid_every})
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert train(run, task_of(run)) == 143
    return run


def shorten(corpus: Path, part: str) -> None:
    """Take the last line away, in each of its forms and languages, and the last image."""
    for path in corpus.glob(f"{part}.*"):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(lines[:-1]), encoding="utf-8")
    max((corpus / "images" / part).rglob("*.png")).unlink()


@pytest.mark.matrix(4)
@pytest.mark.parametrize("task", SMALL)
def test_another_validation_part_is_refused_until_it_is_put_back_and_another_test_part_is_told(
    task: str, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped(task, tmp_path, corpus, monkeypatch)
    shorten(tmp_path / "corpus", "valid")
    shorten(tmp_path / "corpus", "test")
    with pytest.raises(InputError) as caught:
        train(run, task_of(run), resume=True)
    assert "the validation set has changed" in caught.value.what
    assert str(run.folder) in caught.value.where
    assert f'train={{"start_from": "{run.folder}"}}' in caught.value.fix
    for path in corpus.glob("valid.*"):
        shutil.copy(path, tmp_path / "corpus")
    shutil.copytree(corpus / "images/valid", tmp_path / "corpus/images/valid", dirs_exist_ok=True)
    assert train(run, task_of(run), resume=True) == 0
    assert TOLD in (run.folder / "log.txt").read_text()
    assert [row["text"] for row in read_metrics(run.folder) if row.get("change")] == [TOLD]


@pytest.mark.parametrize("by", ["typed", pytest.param("edited", marks=pytest.mark.slow)])
def test_a_finished_run_that_is_not_made_longer_since_its_text_has_changed_is_as_it_was(
    by: str, tmp_path: Path, corpus: Path
) -> None:
    own = shutil.copytree(corpus, tmp_path / "corpus")
    run = new_run_of("causal_lm", tmp_path / "run", own, train={"steps": 2, "valid_every": 2})
    assert train(run, task_of(run)) == 0
    (run.folder / "scores.json").write_text('{"test": {}}')
    config = run.folder / "config.toml"
    config.write_text(
        "# a note\n" + config.read_text().replace("steps = 2\n", "steps = 4\n" if by == "edited" else "steps = 2\n")
    )
    shorten(own, "valid")
    before = {path.name: path.read_bytes() for path in run.folder.iterdir() if path.is_file()}
    over = {"train": {"steps": 4}} if by == "typed" else {}
    with pytest.raises(InputError, match="the validation set has changed"), old_run(run.folder, over) as longer:
        train(longer, task_of(longer), resume=True)
    after = {path.name: path.read_bytes() for path in run.folder.iterdir() if path.is_file() and path.name != "lock"}
    assert after == before
    for path in corpus.glob("valid.*"):
        shutil.copy(path, own)
    with old_run(run.folder, over) as longer:
        assert train(longer, task_of(longer), resume=True) == 0
    assert checkpoint.step_of(checkpoint.steps(run.checkpoints)[-1]) == 4


@pytest.mark.slow
def test_the_same_text_in_another_place_is_the_same(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stopped("translation", tmp_path, corpus, monkeypatch)
    (tmp_path / "corpus").rename(tmp_path / "moved")
    config = run.folder / "config.toml"
    config.write_text(config.read_text().replace(f'"{tmp_path / "corpus"}"', f'"{tmp_path / "moved"}"'))
    moved = Run.open(run.folder)
    assert train(moved, task_of(moved), resume=True) == 0
    assert not any("has changed" in row.get("text", "") for row in read_metrics(run.folder))


def test_before_the_first_validation_another_part_breaks_nothing(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped("causal_lm", tmp_path, corpus, monkeypatch, valid_every=5)
    shorten(tmp_path / "corpus", "valid")
    assert train(run, task_of(run), resume=True) == 0
    assert TOLD.replace("test", "validation") in (run.folder / "log.txt").read_text()


def test_a_checkpoint_that_does_not_tell_its_validation_part_goes_on(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped("causal_lm", tmp_path, corpus, monkeypatch)
    path = checkpoint.steps(run.checkpoints)[-1]
    found = checkpoint.load(path)
    shutil.rmtree(path)
    del found.state["held_out"]
    checkpoint.save(run.checkpoints, found)
    assert "held_out" not in json.loads((path / "state.json").read_text())
    shorten(tmp_path / "corpus", "valid")
    assert train(run, task_of(run), resume=True) == 0


def test_a_task_that_does_not_identify_its_held_out_sets_says_so_at_the_start_and_on_resume(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "whether the validation and test sets are the same after a resume cannot be told: the task has no held_out"
    with monkeypatch.context() as patch:
        patch.setattr(CausalLMTask, "held_out", Task.held_out)
        run = stopped("causal_lm", tmp_path, corpus, patch)
        assert (run.folder / "log.txt").read_text().count(said) == 1
        shorten(tmp_path / "corpus", "valid")
        assert train(run, task_of(run), resume=True) == 0
    assert (run.folder / "log.txt").read_text().count(said) == 2
    known = new_run_of("causal_lm", tmp_path / "known", corpus, train={"steps": 1})
    assert train(known, task_of(known)) == 0
    assert said not in (known.folder / "log.txt").read_text()
