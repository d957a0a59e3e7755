"""A cell of a notebook that trains a run can be repeated: the run goes on, or is replaced, and nothing else is lost."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

import kilolayer as kl
from kilolayer.config import dump
from kilolayer.errors import InputError, OptionError
from kilolayer.runs.lock import locked
from kilolayer.training.stop import Stopped
from tests.fixtures.small_runs import SMALL, stop_after, table, text_table
from tests.runs.run_by_command import printed, refusal

STEPS = {"steps": 2}


def steps_of(run: Any) -> list[int]:
    return [row["step"] for row in run.metrics("train")]


@pytest.mark.parametrize(
    "task", ["translation", *(pytest.param(task, marks=pytest.mark.slow) for task in SMALL if task != "translation")]
)
def test_a_repeated_cell_returns_the_finished_run_and_goes_on_with_more_steps(
    task: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def cell(steps: int) -> Any:
        return kl.train(SMALL[task](corpus), run=tmp_path / "run", resume=True, train={"steps": steps})

    first = cell(2)
    scored = (first.folder / "scores.json").stat().st_mtime_ns
    assert steps_of(cell(2)) == [1, 2]
    assert (first.folder / "scores.json").stat().st_mtime_ns == scored
    assert 'train={"steps": 4} trains it longer' in capsys.readouterr().err
    assert steps_of(cell(3)) == [1, 2, 3]


def test_a_longer_run_keeps_what_was_converted_to_steps_unless_it_is_given(corpus: Path, tmp_path: Path) -> None:
    tables = text_table(corpus)
    del tables["train"]["warmup_steps"], tables["train"]["layers_every"]

    def cell(**train: Any) -> Any:
        return kl.train(tables, run=tmp_path / "run", resume=True, train=train)

    def lengths(run: Any) -> tuple[int, int]:
        return run.config.train.warmup_steps, run.config.train.layers_every

    assert lengths(cell(steps=5)) == (2, 10)
    longer = cell(steps=10)
    assert lengths(longer) == (2, 10)
    rates = [row["lr"] for row in longer.metrics("train")]
    assert rates[2:] == pytest.approx([1e-2 * (2 / step) ** 0.5 for step in range(3, 11)])
    assert lengths(cell(steps=11, warmup_steps=3, layers_every=5)) == (3, 5)
    assert lengths(cell(steps=12, warmup_share=0.5)) == (6, 5)


@pytest.mark.slow
def test_a_cell_with_epochs_is_repeated_too(corpus: Path, tmp_path: Path) -> None:
    def cell() -> Any:
        tables = text_table(corpus)
        for name in ("steps", "warmup_steps"):
            del tables["train"][name]
        return kl.train(tables, run=tmp_path / "run", resume=True, train={"epochs": 0.1, "warmup_share": 0.5})

    first = cell()
    assert first.config.train.steps == cell().config.train.steps > 0


def test_an_interrupted_cell_says_how_to_go_on_and_does(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cell() -> Any:
        return kl.train(text_table(corpus), run=tmp_path / "run", resume=True, train={"steps": 4})

    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Stopped) as stopped:
            cell()
    assert stopped.value.number in (signal.SIGTERM, signal.SIGINT)
    assert str(stopped.value).startswith("stopped by SIG")
    assert f'continue with: kl.train(resume="{tmp_path / "run"}")' in str(stopped.value)
    assert "--resume" not in str(stopped.value)
    assert steps_of(cell()) == [1, 2, 3, 4]


def test_a_cell_whose_model_has_changed_is_refused_and_leaves_the_run(corpus: Path, tmp_path: Path) -> None:
    first = kl.train(text_table(corpus), run=tmp_path / "run", train=STEPS)
    before = (first.folder / "config.toml").read_bytes()
    with pytest.raises(InputError, match=r"(?s)model.dim cannot change.*dim is 8 \(was 16\)") as refused:
        kl.train(text_table(corpus), run=tmp_path / "run", resume=True, train=STEPS, model={"dim": 8})
    assert "overwrite=True" in refused.value.fix
    assert (first.folder / "config.toml").read_bytes() == before
    assert (first.folder / "scores.json").exists()


@pytest.mark.slow
def test_overwrite_replaces_the_run_but_only_once_the_new_one_can_begin(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = kl.train(text_table(corpus), run=folder, train={"steps": 3})
    with pytest.raises(InputError):
        kl.train(text_table(corpus), run=folder, overwrite=True, text={"train": str(tmp_path / "nothing")})
    with pytest.raises(OptionError, match="overwrite the one that it starts from"):
        kl.train(text_table(corpus), run=folder, overwrite=True, train={"start_from": folder})
    with locked(folder), pytest.raises(InputError, match="in use by process"):
        kl.train(text_table(corpus), run=folder, overwrite=True, train=STEPS)
    assert steps_of(first) == [1, 2, 3]
    again = kl.train(text_table(corpus), run=folder, overwrite=True, train=STEPS, model={"dim": 8})
    assert again.config.model.dim == 8
    assert steps_of(again) == [1, 2]
    assert not (folder / "checkpoints" / "step-00000003").exists()
    new = kl.train(text_table(corpus), run=tmp_path / "new", overwrite=True, train=STEPS)
    assert steps_of(new) == [1, 2]


def test_overwrite_deletes_nothing_that_is_not_a_run(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "thesis.tex").write_text("all of it")
    with pytest.raises(InputError, match="something other than a run"):
        kl.train(text_table(corpus), run=folder, overwrite=True)
    assert (folder / "thesis.tex").read_text() == "all of it"
    kl.save(kl.Encoder(9, 8, 2, 8, 1), tmp_path / "model")
    with pytest.raises(InputError, match="something other than a run"):
        kl.train(text_table(corpus), run=tmp_path / "model", overwrite=True)
    kl.load_model(tmp_path / "model")


@pytest.mark.parametrize("resume", [True, "folder"])
def test_resume_and_overwrite_exclude_each_other(resume: Any, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="resume continues a run and overwrite deletes it"):
        kl.train(text_table(corpus), run=tmp_path / "run", resume=resume, overwrite=True)
    with pytest.raises(OptionError, match="overwrite is 'yes'"):
        kl.train(text_table(corpus), run=tmp_path / "run", overwrite="yes")  # pyright: ignore[reportArgumentType]


def test_a_full_folder_is_refused_in_the_words_of_python_and_of_the_shell(
    trained: dict[str, Path], corpus: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as refused:
        kl.train(table(corpus), run=trained["translation"])
    assert refused.value.fix == "choose another with run, resume it with resume=True, or replace it with overwrite=True"
    (tmp_path / "small.toml").write_text(dump(table(corpus)))
    said = refusal("train", tmp_path / "small.toml", "--run", trained["translation"])
    assert "choose another with --run, resume it with --resume, or replace it with --overwrite" in said


@pytest.mark.slow
def test_the_command_overwrites_too(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(dump(text_table(corpus, train=STEPS)))
    for steps in ("2", "1"):
        words = ("train", tmp_path / "small.toml", "--run", tmp_path / "run", "--overwrite")
        printed(*words, "--train.steps", steps, "--train.warmup_steps", "1")
    assert steps_of(kl.load(tmp_path / "run")) == [1]
    assert "--overwrite deletes it" in refusal("train", "--resume", tmp_path / "run", "--overwrite")
