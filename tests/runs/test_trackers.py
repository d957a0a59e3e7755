"""Trackers see what metrics.jsonl sees, go on with a resumed run, and never end one."""

from __future__ import annotations

import logging
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kilolayer.errors import InputError, OptionError
from kilolayer.runs.metrics import read_metrics
from kilolayer.runs.trackers import find_trackers, guarded, make_trackers
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training.loop import train
from tests.fixtures.small_runs import new_run, stop_after, task_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "trackers.py"


class Notebook:
    """Notes what it is called with; raises where it is told to."""

    def __init__(self, fault: str = "") -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fault = fault

    def start(self, folder: Path, config: dict[str, Any], step: int) -> None:
        self._note("start", (folder, config, step))

    def log(self, row: dict[str, Any]) -> None:
        self._note("log", row)

    def finish(self, scores: Any) -> None:
        self._note("finish", scores)

    def _note(self, method: str, given: Any) -> None:
        self.calls.append((method, given))
        if method == self.fault:
            raise RuntimeError("the network is down")


def rows_of(notebook: Notebook) -> list[Any]:
    return [given for method, given in notebook.calls if method == "log"]


def test_a_tracker_is_given_every_row_and_a_resumed_run_starts_it_at_its_step(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, first, second = new_run(tmp_path / "run", corpus), Notebook(), Notebook()
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert train(run, task_of(run), trackers=[first]) == 143
    assert train(run, task_of(run), resume=True, trackers=[second]) == 0
    assert first.calls[0] == ("start", (run.folder, run.config.table(), 0))
    assert second.calls[0] == ("start", (run.folder, run.config.table(), 3))
    assert rows_of(first) + rows_of(second) == read_metrics(run.folder)


@pytest.mark.parametrize("fault", ["start", "log", "finish"])
def test_a_tracker_that_fails_is_named_once_and_ends_nothing(
    tmp_path: Path, corpus: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    run, broken, whole = new_run(tmp_path / "run", corpus, train={"steps": 2}), Notebook(fault), Notebook()
    trackers = guarded([broken, whole])
    with caplog.at_level(logging.WARNING):
        assert train(run, task_of(run), trackers=trackers) == 0
        for each in trackers * 2:
            each.finish({"test": {}})
    (said,) = [record.getMessage() for record in caplog.records if "tracker" in record.getMessage()]
    assert f"Notebook failed in `{fault}`" in said
    assert "RuntimeError: the network is down" in said
    assert broken.calls[-1][0] == fault
    assert sum(method == fault for method, _ in broken.calls) == 1
    assert rows_of(whole) == read_metrics(run.folder)
    assert whole.calls[-1] == ("finish", {"test": {}})
    assert sum(method == "finish" for method, _ in whole.calls) == 1


def test_what_a_tracker_does_to_a_row_stays_with_it() -> None:
    class Greedy(Notebook):
        def log(self, row: dict[str, Any]) -> None:
            row.clear()

    greedy, other = guarded([Greedy(), Notebook()])
    row = {"kind": "train", "step": 1}
    for each in (greedy, other):
        each.start(Path(), {}, 0)
        each.log(row)
    assert rows_of(other.tracker) == [{"kind": "train", "step": 1}]  # type: ignore[arg-type]


@pytest.fixture
def my_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("my_module")
    monkeypatch.setitem(sys.modules, "my_module", module)
    return module


def test_a_configuration_names_trackers_by_their_place(my_module: ModuleType) -> None:
    my_module.Mine = Notebook  # type: ignore[attr-defined]
    given = Notebook()
    made = make_trackers(TrainConfig(trackers=["my_module:Mine"]), [given])
    assert [type(each.tracker) for each in made] == [Notebook, Notebook]
    assert made[1].tracker is given


def test_what_is_no_tracker_is_refused_before_any_work(my_module: ModuleType) -> None:
    my_module.Partial = type("Partial", (), {"start": print, "log": print})  # type: ignore[attr-defined]
    my_module.Asking = type("Asking", (), {"__init__": lambda self, key: None})  # type: ignore[attr-defined]
    for place, what in (
        ("Partial", "it has no finish"),
        ("Asking", "cannot be created: TypeError"),
        ("Absent", "has no 'Absent'"),
    ):
        with pytest.raises(InputError, match=what) as caught:
            make_trackers(TrainConfig(trackers=[f"my_module:{place}"]))
        assert "train.trackers" in caught.value.where
    with pytest.raises(InputError, match="there is no module 'nowhere'"):
        find_trackers(TrainConfig(trackers=["nowhere:Mine"]))
    with pytest.raises(OptionError, match="a tracker is 'wandb'") as caught:
        TrainConfig(trackers=["wandb"])
    assert "my_module:MyTracker" in caught.value.fix


class Recorder:
    """A stand-in for a package: every call of it, and of what it returns, by name."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.summary = SimpleNamespace(update=self._called("summary.update"))
        self.info = SimpleNamespace(run_id="the run's id")

    def _called(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Recorder:
            self.calls.append((name, arguments, options))
            return self

        return call

    def __getattr__(self, name: str) -> Any:
        return self._called(name)


SCORES = {"test": {"bleu": {"name": "BLEU", "value": 12.5, "signature": "s"}}, "weights": {"steps": [2]}}
NUMBERS = {"train/loss": 2.0}


def followed_twice(tracker: str, folder: Path) -> None:
    """A run that is stopped after a step, and resumed to its end."""
    for step, scores in ((0, None), (1, SCORES)):
        each = runpy.run_path(str(EXAMPLE))[tracker]()
        each.start(folder, {"model": {"dim": 16}, "train": {"lr": 0.1}}, step)
        each.log({"kind": "train", "step": step + 1, "loss": 2.0, "text": "no number"})
        each.finish(scores)


def test_the_example_speaks_to_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    followed_twice("WeightsAndBiases", tmp_path)
    names = [name for name, _, _ in wandb.calls]
    assert names == ["init", "log", "summary.update", "finish"] * 2
    begun = [options for name, _, options in wandb.calls if name == "init"]
    assert begun[0] == begun[1]  # the same run goes on
    assert (begun[0]["resume"], begun[0]["config"]["model"]["dim"], begun[0]["name"]) == ("allow", 16, tmp_path.name)
    assert [call[1:] for call in wandb.calls if call[0] == "log"] == [((NUMBERS,), {"step": step}) for step in (1, 2)]
    assert [call[1] for call in wandb.calls if call[0] == "summary.update"] == [({},), ({"test/bleu": 12.5},)]
    assert [call[2] for call in wandb.calls if call[0] == "finish"] == [{"exit_code": 1}, {"exit_code": 0}]


def test_the_example_speaks_to_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = Recorder()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    followed_twice("MLflow", tmp_path)
    started = [options["run_id"] for name, _, options in mlflow.calls if name == "start_run"]
    assert started == [None, "the run's id"]
    assert [call[1] for call in mlflow.calls if call[0] == "log_params"] == [({"model.dim": 16, "train.lr": 0.1},)]
    logged = [call[1:] for call in mlflow.calls if call[0] == "log_metrics"]
    assert logged == [((NUMBERS,), {"step": 1}), (({},), {}), ((NUMBERS,), {"step": 2}), (({"test/bleu": 12.5},), {})]
    assert [call[1] for call in mlflow.calls if call[0] == "end_run"] == [("KILLED",), ("FINISHED",)]


def test_the_example_is_short() -> None:
    text = EXAMPLE.read_text()
    for name in ("WeightsAndBiases", "MLflow"):
        lines = text.partition(f"class {name}")[2].partition("\n\n\n")[0].splitlines()
        assert len([line for line in lines if line.strip()]) <= 20


def test_tensorboard_is_one_of_them(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boards: list[tuple[tuple[Any, ...], dict[str, Any], Recorder]] = []

    def made(*arguments: Any, **options: Any) -> Recorder:
        boards.append((arguments, options, Recorder()))
        return boards[-1][-1]

    monkeypatch.setattr("kilolayer.runs.trackers.summary_writer", lambda: made)
    run = new_run(tmp_path / "run", corpus, train={"steps": 2, "tensorboard": True})
    trackers = make_trackers(run.config.train)
    for resume in (False, True):
        assert train(run, task_of(run), resume=resume, trackers=trackers) == 0
        for each in trackers:
            each.finish(None)
    begun = [(arguments, options) for arguments, options, _ in boards]
    assert begun == [((str(run.folder / "tensorboard"),), {"purge_step": step + 1}) for step in (0, 2)]
    scalars = [given for name, given, _ in boards[0][-1].calls if name == "add_scalar"]
    rows = [row for row in read_metrics(run.folder) if row["kind"] == "train"]
    assert [each for each in scalars if each[0] == "train/loss"] == [("train/loss", row["loss"], row["step"]) for row in rows]
    assert not any("text" in name or name.endswith(("/kind", "/step")) for name, _, _ in scalars)
    assert [name for name, _, _ in boards[0][-1].calls][-1] == "close"
