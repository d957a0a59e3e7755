"""kl.train goes the command's own way: the same files to the bit, from any form of configuration, in any thread."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer.config import build, dump
from kilolayer.errors import InputError, KilolayerError, OptionError
from kilolayer.runs.lock import locked
from kilolayer.runs.run import Run
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.translation.translator import Translator
from tests.fixtures.small_runs import SMALL, record, stop_after, table, text_table

STEPS = {"steps": 4}
LONGER = {"steps": 6}


def left(folder: Path) -> dict[str, Any]:
    """Weights, optimizer, metrics and scores, to the bit."""
    return {**record(Run.open(folder)), "scores": json.loads((folder / "scores.json").read_text())}


def test_python_leaves_what_the_command_leaves(trained: dict[str, Path], corpus: Path, tmp_path: Path) -> None:
    torch.manual_seed(12345)  # nothing may come from what this process did before
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    run = kl.train(table(corpus), run=tmp_path / "run", train=STEPS)
    assert isinstance(run, Translator)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), random)
    assert left(run.folder) == left(trained["translation"])
    assert {path.name for path in run.folder.iterdir()} == {path.name for path in trained["translation"].iterdir()}
    assert (run.folder / "config.toml").read_text() == (trained["translation"] / "config.toml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(set(SMALL) - {"translation"}))
def test_so_does_every_task(task: str, trained: dict[str, Path], corpus: Path, tmp_path: Path) -> None:
    assert left(kl.train(SMALL[task](corpus), run=tmp_path / "run", train=STEPS).folder) == left(trained[task])


@pytest.mark.slow
def test_a_configuration_is_as_good_as_its_tables(trained: dict[str, Path], corpus: Path, tmp_path: Path) -> None:
    run = kl.train(build(RunConfig, text_table(corpus, train=STEPS)), run=tmp_path / "run")
    assert left(run.folder) == left(trained["causal_lm"])


def test_keywords_are_tables_of_python_values(corpus: Path, tmp_path: Path) -> None:
    tables: dict[str, Any] = text_table(corpus)
    tables["text"]["train"] = Path(tables["text"]["train"])
    recipe = kl.recipes.get("admin", weight="trainable")
    model = {**tables.pop("model"), "recipe": recipe, "moe": kl.MoE(experts=2, every=1), "kv_heads": None}
    run = kl.train(tables, run=tmp_path / "run", model=model, train={"steps": 1, "warmup_steps": 1})
    assert run.config.model.recipe == recipe
    assert run.config.model.moe == kl.MoE(experts=2, every=1)
    assert run.metrics("train")[-1]["step"] == 1


@pytest.mark.slow
def test_a_finished_run_is_returned_and_goes_on(trained: dict[str, Path], corpus: Path, tmp_path: Path) -> None:
    run = kl.train(text_table(corpus), run=tmp_path / "run", train=STEPS)
    again = kl.train(resume=str(run.folder))
    assert left(again.folder) == left(trained["causal_lm"])
    longer = kl.train(resume=run.folder, train=LONGER)
    assert longer.config.train.steps == 6
    assert [row["step"] for row in longer.metrics("train")] == [1, 2, 3, 4, 5, 6]


class Listener:
    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def start(self, folder: Path, config: dict[str, Any], step: int) -> None:
        self.heard.append(("start", folder.name, config["train"]["steps"], step))

    def log(self, row: dict[str, Any]) -> None:
        self.heard.append((row["kind"], row["step"]))

    def finish(self, scores: dict[str, Any] | None) -> None:
        self.heard.append(("finish", scores))


def test_a_file_is_trained_in_another_thread_and_followed_by_a_tracker(
    trained: dict[str, Path], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(dump(text_table(corpus)))
    found: list[Any] = []
    listener = Listener()
    thread = threading.Thread(target=lambda: found.append(kl.train("mine.toml", trackers=[listener], train=STEPS)))
    thread.start()
    thread.join()
    (run,) = found
    assert run.folder == Path("runs/mine")
    assert left(run.folder) == left(trained["causal_lm"])
    assert listener.heard[0] == ("start", "mine", 4, 0)
    assert [each for each in listener.heard if each[0] == "train"] == [("train", step) for step in (1, 2, 3, 4)]
    assert listener.heard[-1] == ("finish", run.scores())


class EvaluatesOnTheWay:
    """Leaves what `kilolayer evaluate` leaves of a run that still trains."""

    def start(self, folder: Path, config: dict[str, Any], step: int) -> None:
        self.scores = folder / "scores.json"

    def log(self, row: dict[str, Any]) -> None:
        self.scores.write_text('{"test": {}}')

    def finish(self, scores: dict[str, Any] | None) -> None:
        assert scores is not None


def test_scores_from_the_way_are_not_taken_for_those_of_the_end(corpus: Path, tmp_path: Path) -> None:
    run = kl.train(text_table(corpus), run=tmp_path / "run", train=STEPS, trackers=[EvaluatesOnTheWay()])
    assert run.scores()["weights"]["steps"] == [4]


def test_an_interrupt_leaves_a_checkpoint_and_the_run_goes_on(
    trained: dict[str, Path], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            kl.train(text_table(corpus), run=tmp_path / "run", train=STEPS)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)] == handlers
    assert not (tmp_path / "run/scores.json").exists()
    assert left(kl.train(resume=tmp_path / "run").folder) == left(trained["causal_lm"])
    assert left(kl.train(resume=str(tmp_path / "run")).folder) == left(trained["causal_lm"])  # finished: it is returned


MISTAKES: dict[str, tuple[Callable[[Path, Path], Any], type[KilolayerError], str]] = {
    "a wrong table": (lambda corpus, folder: kl.train(table(corpus), run=folder, trian=STEPS), OptionError, "mean 'train'"),
    "a wrong option": (
        lambda corpus, folder: kl.train(table(corpus), run=folder, train={"step": 3}),
        OptionError,
        "(?s)did you mean 'steps'.*in the configuration and the keywords",
    ),
    "no table": (lambda corpus, folder: kl.train(table(corpus), run=folder, train=3), OptionError, "write it as a table"),
    "no configuration": (lambda corpus, folder: kl.train(3, run=folder), OptionError, "the configuration is 3"),  # pyright: ignore
    "no configuration and no folder": (lambda corpus, folder: kl.train(5), OptionError, "(?s)the configuration is 5.*kl.train"),  # pyright: ignore
    "a folder that is none": (lambda corpus, folder: kl.train(table(corpus), run=5), InputError, "run is 5, not a path"),  # pyright: ignore
    "a run that is none": (lambda corpus, folder: kl.train(resume=5), InputError, "resume is 5, not a path"),  # pyright: ignore
    "no file": (lambda corpus, folder: kl.train("no.toml", run=folder), OptionError, "does not exist"),
    "no folder": (lambda corpus, folder: kl.train(table(corpus)), OptionError, 'name one: run="runs/mine"'),
    "both folders": (lambda corpus, folder: kl.train(run=folder, resume=folder), OptionError, "resume takes no"),
    "not a tracker": (
        lambda corpus, folder: kl.train(table(corpus), run=folder, trackers=[Listener(), "a:B"]),  # pyright: ignore
        InputError,
        "(?s)it has no start: 'a:B'.*trackers, number 2",
    ),
    "a tracker's class": (
        lambda corpus, folder: kl.train(table(corpus), run=folder, trackers=[Listener]),  # pyright: ignore
        InputError,
        "it is a class",
    ),
    "a tracker without a list": (
        lambda corpus, folder: kl.train(table(corpus), run=folder, trackers=Listener()),  # pyright: ignore
        OptionError,
        r"trackers=\[MyTracker",
    ),
    "nothing to resume": (lambda corpus, folder: kl.train(resume=folder), InputError, "this is not a run"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_before_any_work(name: str, corpus: Path, tmp_path: Path) -> None:
    call, kind, text = MISTAKES[name]
    with pytest.raises(kind, match=text):
        call(corpus, tmp_path / "run")
    assert not (tmp_path / "run/config.toml").exists()


def test_a_folder_in_use_and_one_that_is_full_are_refused(trained: dict[str, Path], corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not empty"):
        kl.train(table(corpus), run=trained["translation"])
    with locked(tmp_path / "run"), pytest.raises(InputError, match="in use by process"):
        kl.train(table(corpus), run=tmp_path / "run")


class Calls:
    """Makes each of these calls when the run begins, in another thread or in the one that trains."""

    def __init__(self, calls: list[Callable[[], Any]], in_thread: bool) -> None:
        self.calls, self.in_thread, self.refused, self.answers = calls, in_thread, [], []

    def start(self, folder: Path, config: dict[str, Any], step: int) -> None:
        if not self.in_thread:
            return self._make()
        (thread := threading.Thread(target=self._make)).start()
        return thread.join()

    def _make(self) -> None:
        for call in self.calls:
            try:
                self.answers.append(call())
            except KilolayerError as error:
                self.refused.append(error.what)

    def log(self, row: dict[str, Any]) -> None:
        pass

    def finish(self, scores: dict[str, Any] | None) -> None:
        pass


def calls_that_draw(folder: Path, table: dict[str, Any]) -> list[Callable[[], Any]]:
    """The calls that draw from torch's random state, for a small model."""
    path = folder / "own.toml"
    path.write_text(dump(table))
    model = kl.Decoder(vocab_size=9, layers=1, dim=8, heads=2, ffn_dim=16, recipe="admin", dropout=0.1)
    ids = torch.arange(8).view(1, 8)
    return [
        lambda: kl.forecast(path),
        lambda: kl.diagnose(path, steps=1),
        lambda: kl.diagnose(model, lambda model: model(ids).logits.logsumexp(-1).mean()),
        lambda: kl.calibrate(model, ids),
    ]


def test_a_second_one_at_the_same_time_is_refused(trained: dict[str, Path], corpus: Path, tmp_path: Path) -> None:
    second = [lambda: kl.train(text_table(corpus), run=tmp_path / "second")]
    other = Calls([*second, *calls_that_draw(tmp_path, text_table(corpus))], in_thread=True)
    run = kl.train(text_table(corpus), run=tmp_path / "first", train=STEPS, trackers=[other])
    assert ["another kl.train is running" in what for what in other.refused] == [True] * 5
    assert not (tmp_path / "second").exists()
    assert left(run.folder) == left(trained["causal_lm"])
    kl.train(resume=run.folder)  # after the first has ended, another one begins


def test_a_tracker_may_measure_in_the_thread_that_trains(trained: dict[str, Path], corpus: Path, tmp_path: Path) -> None:
    inside = Calls(calls_that_draw(tmp_path, text_table(corpus))[1:], in_thread=False)
    run = kl.train(text_table(corpus), run=tmp_path / "first", train=STEPS, trackers=[inside])
    assert (len(inside.answers), inside.refused) == (3, [])
    assert left(run.folder) == left(trained["causal_lm"])
