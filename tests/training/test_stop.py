"""Signals at every stage of a run: it ends in time, with its own code, and goes on as if it had not been stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from kilolayer.cli.main import main
from kilolayer.config import dump
from kilolayer.data import piece_trainer
from kilolayer.report import page
from kilolayer.runs import checkpoint
from kilolayer.runs.metrics import read_metrics
from kilolayer.runs.run import Run
from kilolayer.runtime.recorder import Recorder, WorkItem
from kilolayer.tasks.translation import task as translation
from kilolayer.tasks.translation.task import TranslationTask
from kilolayer.training import stop
from kilolayer.training.loop import train
from kilolayer.training.step import Stepper
from kilolayer.training.stop import Stopped, handle_signals
from kilolayer.training.trainer import Best, Trainer
from tests.fixtures.fork_server import SERVER
from tests.fixtures.small_runs import last_checkpoint, new_run, new_text_run, record, table, task_of, text_table, train_in_child

FOREVER = 60.0  # much longer than a signal may take


def interrupt(number: int = signal.SIGTERM) -> None:
    """A signal in the middle of work that would take for ever."""
    os.kill(os.getpid(), number)
    time.sleep(FOREVER)


def at_call(patch: pytest.MonkeyPatch, owner: Any, name: str, call: int, act: Callable[[], None] = interrupt) -> None:
    """Do `act` at the beginning of the n-th call."""
    real, calls = getattr(owner, name), 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            act()
        return real(*arguments, **options)

    patch.setattr(owner, name, counted)


@pytest.fixture(autouse=True)
def _in_time(request: pytest.FixtureRequest):
    """No test has waited for the end of what was to be ended."""
    before = time.monotonic()
    yield
    if request.node.get_closest_marker("slow") is None:
        assert time.monotonic() - before < FOREVER


def kept(run: Run) -> dict[str, list[Any]]:
    """Every checkpoint that is left, and what it says of validations."""
    states = {path.name: checkpoint.load_state(path) for path in checkpoint.steps(run.checkpoints)}
    return {name: [state[key] for key in ("best", "validated", "scheduled")] for name, state in states.items()}


VALIDATED: dict[str, tuple[Any, dict[str, Any], str, int]] = {
    "loss": (new_run, {"valid_every": 2}, "_loss", 2),
    "BLEU": (new_run, {"valid_every": 2, "valid_bleu": True}, "_bleu", 1),
    "at a save": (new_run, {"valid_every": 2, "save_every": 2, "valid_bleu": True}, "_bleu", 2),
    "the last": (new_run, {"valid_every": 4, "patience": 9}, "_loss", 2),
}


@pytest.mark.matrix(4)
@pytest.mark.parametrize("case", VALIDATED)
def test_a_validation_that_a_signal_ends_is_made_first_by_the_resumed_run(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    make, options, function, call = VALIDATED[case]
    whole, broken = (make(tmp_path / name, corpus, train=options) for name in ("whole", "broken"))
    assert train(whole, task_of(whole)) == 0
    with monkeypatch.context() as patch:
        at_call(patch, TranslationTask, function, call)
        assert train(broken, task_of(broken)) == 143
    step = {"loss": 4, "BLEU": 2, "at a save": 4, "the last": 6}[case]
    last = last_checkpoint(broken)
    assert last.step == step
    assert last.state["validated"] == {4: 2, 2: 0, 6: 4}[step]
    assert f"step {step}: the validation was interrupted" in (broken.folder / "log.txt").read_text()
    torch.manual_seed(12345)
    assert train(broken, task_of(broken), resume=True) == 0
    assert record(broken) == record(whole)
    assert kept(broken) == kept(whole)


@pytest.mark.slow
def test_a_validation_whose_checkpoint_was_not_written_is_in_the_metrics_once(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = (new_run(tmp_path / name, corpus, train={"valid_every": 2}) for name in ("whole", "broken"))
    assert train(whole, task_of(whole)) == 0
    with monkeypatch.context() as patch:
        at_call(patch, TranslationTask, "_loss", 2)
        assert train(broken, task_of(broken)) == 143

    def killed() -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        at_call(patch, Best, "update", 1, killed)
        with pytest.raises(SystemExit):
            train(broken, task_of(broken), resume=True)
    assert [row["step"] for row in read_metrics(broken.folder) if row["kind"] == "valid"] == [2, 4]
    assert train(broken, task_of(broken), resume=True) == 0
    assert record(broken) == record(whole)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("make", [new_run, new_text_run])
def test_it_is_ended_in_the_middle_of_its_batches(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    options: dict[str, Any] = {
        "model": {"dropout": 0.1, "moe": {"experts": 4, "second": "random"}},
        "train": {"valid_every": 3},
    }
    whole, broken = (make(tmp_path / name, corpus, **options) for name in ("whole", "broken"))
    assert train(whole, task_of(whole)) == 0
    for call in (3 + 2, 1 + 1):  # of the first three steps and the second batch; then, resumed, of the second batch again
        with monkeypatch.context() as patch:
            at_call(patch, Recorder, "run", call)
            assert train(broken, task_of(broken), resume=True) == 143
        assert last_checkpoint(broken).step == 3
        assert last_checkpoint(broken).state["validated"] == 0
    assert train(broken, task_of(broken), resume=True) == 0
    assert record(broken) == record(whole)


def test_a_signal_in_the_step_before_a_validation_does_not_wait_for_it(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path / "run", corpus, train={"valid_every": 2})
    at_call(monkeypatch, Stepper, "step", 2, lambda: os.kill(os.getpid(), signal.SIGINT))
    monkeypatch.setattr(TranslationTask, "_loss", lambda *_: pytest.fail("validated"))
    assert train(run, task_of(run)) == 130
    assert last_checkpoint(run).step == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="one batch"),
        pytest.param({"accumulate": 3, "layers_every": 1}, id="several", marks=pytest.mark.slow),
    ],
)
def test_a_step_that_does_not_end_is_abandoned_without_a_trace(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """As one that compiles. Half of it is done: gradients and sums, the data's position, what dropout drew."""
    experts = {"moe": {"experts": 4, "second": "random", "loss_free": 1e-2}}
    sections = {"model": experts, "train": {"save_every": 2, **options}}
    whole, broken = (new_run(tmp_path / name, corpus, **sections) for name in ("whole", "broken"))
    assert train(whole, task_of(whole)) == 0
    accumulate, calls = Stepper.accumulate, 0

    def endless(stepper: Stepper, *parts: Tensor) -> None:
        nonlocal calls
        calls += 1
        accumulate(stepper, *parts)
        if calls == 3 * options.get("accumulate", 1) + 1:
            interrupt()

    with monkeypatch.context() as patch:
        patch.setattr(stop, "STEP_SECONDS", 0.2)
        patch.setattr(Stepper, "accumulate", endless)
        assert train(broken, task_of(broken)) == 143
    assert last_checkpoint(broken).step == 3
    assert "step 4 did not end" in (broken.folder / "log.txt").read_text()
    assert train(broken, task_of(broken), resume=True) == 0
    assert record(broken) == record(whole)


def test_a_step_whose_update_has_begun_is_waited_for(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(tmp_path / "run", corpus)
    update, calls = Stepper.update, 0

    def slow(stepper: Stepper) -> None:
        nonlocal calls
        calls += 1
        update(stepper)
        if calls == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)

    monkeypatch.setattr(stop, "STEP_SECONDS", 0.1)
    monkeypatch.setattr(Stepper, "update", slow)
    assert train(run, task_of(run)) == 143
    assert last_checkpoint(run).step == 3
    assert read_metrics(run.folder)[-1]["step"] == 3


def test_a_step_that_is_replayed_is_abandoned_only_before_the_piece_with_its_update(tmp_path: Path, corpus: Path) -> None:
    run = new_run(tmp_path / "run", corpus)
    trainer = Trainer(run, task_of(run))
    trainer.begin(None)
    stepper = Stepper(trainer.model, trainer.optimizer, trainer.config, trainer.guard, trainer.device)
    assert stepper.can_abandon
    for function, may in ((stepper.accumulate, True), (stepper.update, False), (stepper.accumulate_and_update, False)):
        stepper.recorder.replaying = WorkItem("name", function)
        assert stepper.can_abandon == may


def typed(tmp_path: Path, corpus: Path, of: Callable[..., dict[str, Any]] = table, **sections: Any) -> list[str]:
    (tmp_path / "run.toml").write_text(dump(of(corpus, **sections)))
    return ["train", str(tmp_path / "run.toml"), "--run", str(tmp_path / "run")]


@pytest.mark.parametrize(
    ("of", "sections"),
    [(table, {}), (text_table, {"tokenizer": {"kind": "byte_bpe", "vocab_size": 330}})],
    ids=["SentencePiece", "byte-level BPE"],
)
def test_the_training_of_a_vocabulary_is_ended_with_its_process(
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    of: Callable[..., dict[str, Any]],
    sections: dict[str, Any],
) -> None:
    monkeypatch.setenv("KILOLAYER_CACHE", str(tmp_path / "cache"))
    children: list[subprocess.Popen[bytes]] = []

    class Endless(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            os.kill(self.pid, signal.SIGSTOP)
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
            children.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", Endless)
        assert main(typed(tmp_path, corpus, of, **sections)) == 143
    assert [child.returncode for child in children] == [-signal.SIGKILL]
    assert "there is nothing to resume yet" in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.toml").exists()
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")]  # no draft, no lock


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    ("owner", "name", "begun"),
    [
        (translation, "find_corpora", False),
        (translation, "tokenizers_for", False),
        (translation, "encode_training", False),
        (TranslationTask, "score", True),
        (page, "render", True),
    ],
    ids=["finding text", "vocabulary", "encoding", "scoring", "report"],
)
def test_before_and_after_training_a_signal_acts_at_once(
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    owner: Any,
    name: str,
    begun: bool,
) -> None:
    words = typed(tmp_path, corpus, train={"steps": 1})
    with monkeypatch.context() as patch:
        at_call(patch, owner, name, 1)
        before = time.monotonic()
        assert main(words) == 143
        assert time.monotonic() - before < 30
    shown = capsys.readouterr().err.splitlines()[-1]
    assert (f"continue with: kilolayer train --resume {tmp_path / 'run'}" in shown) == begun
    assert ("there is nothing to resume yet" in shown) != begun
    assert main(["train", "--resume", str(tmp_path / "run")] if begun else words) == 0
    assert (tmp_path / "run" / "report.html").exists()


def test_an_exception_that_was_dropped_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "REPEAT_SECONDS", 0.1)
    with handle_signals():
        with suppress(Stopped):  # as Python does in a destructor
            interrupt(signal.SIGINT)
        with pytest.raises(Stopped) as caught:
            time.sleep(FOREVER)
    assert caught.value.number == signal.SIGINT


def test_what_a_destructor_drops_is_raised_again_soon_and_shown_to_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    class Interrupted:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(FOREVER)

    before = time.monotonic()
    hook = sys.unraisablehook
    with handle_signals():
        Interrupted()
        with pytest.raises(Stopped):
            time.sleep(FOREVER)
    assert time.monotonic() - before < stop.REPEAT_SECONDS
    assert capfd.readouterr().err == ""
    assert sys.unraisablehook is hook


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "call"), [(safetensors.torch, "load_file", 1), (TranslationTask, "_loss", 2), (Stepper, "accumulate", 3)]
)
def test_a_signal_that_a_library_turns_into_an_error_of_its_own_is_a_signal(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int
) -> None:
    def converted() -> None:
        try:
            interrupt()
        except Stopped:
            raise TypeError("could not determine the shape of an object") from None

    monkeypatch.setattr(stop, "STEP_SECONDS", 0.1)
    words = typed(tmp_path, corpus, train={"valid_every": 2})
    with monkeypatch.context() as patch:
        at_call(patch, owner, name, call, converted)
        assert main(words) == 143
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0


def test_an_error_that_no_signal_has_caused_stays_one() -> None:
    with handle_signals() as found:
        with pytest.raises(TypeError), found.raising_at_once():
            raise TypeError
        with suppress(Stopped), found.raising_at_once():
            interrupt()
        found.acknowledge()
        with pytest.raises(TypeError), found.waiting_for_step():
            raise TypeError


def test_handlers_and_alarm_are_put_back() -> None:
    numbers = (*stop.SIGNALS, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    with pytest.raises(Stopped), handle_signals():
        interrupt()
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_second_signal_raises_while_the_first_waits_for_a_step() -> None:
    with handle_signals() as found, found.waiting_for_step():
        os.kill(os.getpid(), signal.SIGTERM)
        assert (found.signal, found.is_repeated) == (signal.SIGTERM, False)
        with pytest.raises(Stopped) as caught:
            interrupt(signal.SIGINT)
    assert caught.value.number == signal.SIGTERM


def test_a_trainer_of_a_vocabulary_ends_with_the_process_that_started_it() -> None:
    child = subprocess.Popen([sys.executable, "-m", piece_trainer.__name__, "1"], stdin=subprocess.PIPE)
    assert child.wait(30) == 1  # its parent is not process 1, and its input is still open
    assert child.stdin is not None
    child.stdin.close()


def write_slowly(folder: str) -> None:
    """What a child does: train, and never end the write of a checkpoint; FOLDER.writing tells that it has begun."""
    write = checkpoint.write_hashed

    def slow(path: Path, parts: Iterable[Any]) -> dict[str, Any]:
        Path(f"{folder}.writing").touch()
        time.sleep(FOREVER)
        return write(path, parts)

    checkpoint.write_hashed = slow
    train_in_child(folder)


def ignore_hangups(folder: str) -> None:
    """What a child does that nohup has started."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    train_in_child(folder)


def start(run: Run, target: Callable[[str], None] = train_in_child) -> ForkServerProcess:
    process = SERVER.Process(target=target, args=(str(run.folder),))
    process.start()
    return process


def wait_until(reached: Callable[[], bool], process: ForkServerProcess) -> None:
    end = time.monotonic() + 60
    while not reached():
        assert process.is_alive()
        assert time.monotonic() < end
        time.sleep(0.02)


def send(process: ForkServerProcess, number: int) -> None:
    assert process.pid is not None
    os.kill(process.pid, number)


@pytest.mark.slow
def test_a_second_signal_does_not_wait_for_the_checkpoint_and_the_first_gives_the_code(tmp_path: Path, corpus: Path) -> None:
    run = new_run(tmp_path / "run", corpus, train={"steps": 100_000})
    process = start(run, write_slowly)
    wait_until(lambda: len(read_metrics(run.folder)) > 2, process)
    send(process, signal.SIGTERM)
    wait_until(Path(f"{run.folder}.writing").exists, process)
    before = time.monotonic()
    send(process, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 143, Path(f"{run.folder}.out").read_text()
    assert time.monotonic() - before < 10
    assert checkpoint.steps(run.checkpoints) == []  # half of one is none
    assert "Traceback" not in Path(f"{run.folder}.out").read_text()


@pytest.mark.slow
def test_the_end_of_a_terminal_ends_the_run_unless_it_is_to_be_outlived(tmp_path: Path, corpus: Path) -> None:
    runs = [new_run(tmp_path / name, corpus, train={"steps": 100_000}) for name in ("plain", "nohup")]
    plain, outliving = (start(run, how) for run, how in zip(runs, (train_in_child, ignore_hangups), strict=True))
    for run, process in zip(runs, (plain, outliving), strict=True):
        wait_until(lambda run=run: len(read_metrics(run.folder)) > 2, process)
        send(process, signal.SIGHUP)
    plain.join(60)
    assert plain.exitcode == 129
    assert last_checkpoint(runs[0]).step == read_metrics(runs[0].folder)[-1]["step"]
    steps = len(read_metrics(runs[1].folder))
    wait_until(lambda: len(read_metrics(runs[1].folder)) > steps + 2, outliving)
    send(outliving, signal.SIGTERM)
    outliving.join(60)
    assert outliving.exitcode == 143


LONG: dict[str, Any] = {
    "train": {"steps": 30, "save_every": 7, "valid_every": 5, "log_every": 4, "layers_every": 3, "valid_bleu": True, "keep": 2}
}
