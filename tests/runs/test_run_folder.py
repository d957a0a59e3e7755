"""What a run folder must be, before any work is done in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from kilolayer.errors import InputError, OptionError
from kilolayer.runs.lock import locked
from kilolayer.runs.metrics import Metrics, read_metrics
from kilolayer.runs.run import Run, cache_folder, check_new, choose_device
from tests.fixtures.small_runs import new_run, task_of


def test_a_run_that_was_created_opens_as_it_was(tmp_path: Path, corpus: Path) -> None:
    run = new_run(tmp_path / "deep" / "run", corpus, model={"dropout": 0.3}, train={"lr": 3.3e-4, "clip_norm": 1.0})
    opened = Run.open(run.folder)
    assert opened.config == run.config
    assert opened.config.train.lr == 3.3e-4
    assert opened.config.model.vocab_size == task_of(opened).tokenizers.target.vocab_size
    assert sorted(path.name for path in run.folder.iterdir()) == ["config.toml", "tokenizer.model"]


@pytest.mark.parametrize(
    ("capability", "options", "expected"),
    [
        (None, {}, "fp32"),
        ((9, 0), {}, "bf16"),
        ((8, 0), {}, "bf16"),
        ((7, 5), {}, "fp32"),
        ((9, 0), {"device": "cpu"}, "fp32"),
        ((9, 0), {"precision": "fp32"}, "fp32"),
        (None, {"precision": "bf16"}, "bf16"),
    ],
)
def test_the_precision_is_that_of_the_device_and_stays(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capability: object, options: dict[str, str], expected: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        patch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        run = new_run(tmp_path / "run", corpus, train={"device": "auto", **options})
    assert Run.open(run.folder).config.train.precision == run.config.train.precision == expected


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError, match="not empty") as caught:
        check_new(tmp_path)
    assert caught.value.where == str(tmp_path)
    assert "resume=True" in caught.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_what_a_killed_start_leaves_is_no_hindrance(tmp_path: Path) -> None:
    for name in ("lock", "tokenizer.model", ".config.toml.0123abcd.part"):
        (tmp_path / name).touch()
    check_new(tmp_path)
    (tmp_path / "config.toml").touch()
    with pytest.raises(InputError, match="not empty"):
        check_new(tmp_path)


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_path_that_is_a_file_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="is a file"):
        check_new(tmp_path / "file" / below)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(InputError, match="cannot be written: permission denied"):
            check_new(tmp_path / "run")
    finally:
        tmp_path.chmod(0o700)


def test_any_other_refusal_of_the_system_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    with pytest.raises(InputError, match="cannot be written: read-only file system") as caught:
        check_new(tmp_path / "run")
    assert caught.value.where == str(tmp_path / "run")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(InputError, match="not a run") as caught:
            Run.open(folder)
        assert caught.value.where == str(folder)
        assert "config.toml" in caught.value.fix


def test_a_mistake_in_a_runs_configuration_is_placed(tmp_path: Path, corpus: Path) -> None:
    run = new_run(tmp_path / "run", corpus)
    text = (run.folder / "config.toml").read_text()
    (run.folder / "config.toml").write_text(text.replace("warmup_steps", "warmup_stepz"))
    with pytest.raises(OptionError, match="did you mean 'warmup_steps'") as caught:
        Run.open(run.folder)
    assert str(run.folder / "config.toml") in caught.value.where


def test_one_process_at_a_time_and_each_after_the_other(tmp_path: Path) -> None:
    taken = pytest.raises(InputError, match=f"in use by process {os.getpid()}")
    with locked(tmp_path / "run"), taken, locked(tmp_path / "run"):
        pass
    with locked(tmp_path / "run"):
        pass


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KILOLAYER_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("KILOLAYER_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "kilolayer"


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto").type == "cpu"
    with pytest.raises(OptionError, match="no CUDA device"):
        choose_device("cuda")


def test_metrics_are_json_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0)
    metrics.write("train", 1, loss=float("nan"), nested={"a": [1.5, float("inf")]})
    assert read_metrics(tmp_path) == [{"kind": "train", "step": 1, "loss": None, "nested": {"a": [1.5, None]}}]


def test_metrics_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0)
    for step in range(1, 6):
        metrics.write("train", step, loss=1.0)
    Metrics(tmp_path, 3).write("train", 4, loss=2.0)
    assert [(row["step"], row["loss"]) for row in read_metrics(tmp_path)] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]
