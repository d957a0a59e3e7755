"""Real processes, really killed."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest

from kilolayer.cli.main import main
from kilolayer.errors import InputError
from kilolayer.runs import checkpoint
from kilolayer.runs.lock import locked
from kilolayer.runs.metrics import read_metrics
from kilolayer.runs.run import Run
from kilolayer.training.loop import train
from kilolayer.training.step import Stepper
from tests.fixtures.fork_server import SERVER
from tests.fixtures.small_runs import new_run, record, stop_after, task_of, train_in_child, write_corpus

POINTS = [
    *(f"{when} {name}" for name in (*checkpoint.FILES, "manifest.json") for when in ("half of", "after")),
    "before the rename",
    "after the rename",
    "in the delete",
]
QUICK = (
    "half of model.safetensors",
    "half of manifest.json",
    "before the rename",
    "in the delete",
)
LONG: dict[str, Any] = {
    "train": {"steps": 30, "save_every": 2, "valid_every": 9, "log_every": 4, "layers_every": 3, "accumulate": 2, "keep": 2}
}


def start(run: Run, point: str | None = None) -> ForkServerProcess:
    process = SERVER.Process(target=train_in_child, args=(str(run.folder), point))
    process.start()
    return process


def wait_for_steps(run: Run, count: int, process: ForkServerProcess) -> None:
    end = time.monotonic() + 60
    while sum(row["kind"] == "train" for row in read_metrics(run.folder)) < count:
        assert process.is_alive(), Path(f"{run.folder}.out").read_text()
        assert time.monotonic() < end
        time.sleep(0.01)


def assert_resumable(run: Run) -> None:
    """Nothing but whole checkpoints has a checkpoint's name."""
    assert all(checkpoint.find_fault(path) is None for path in checkpoint.steps(run.checkpoints))


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, Any]:
    run = new_run(tmp_path_factory.mktemp("short") / "run", corpus, train={"save_every": 2, "keep": 1})
    train(run, task_of(run))
    return record(run)


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    "point", [point if point in QUICK else pytest.param(point, marks=pytest.mark.slow) for point in POINTS]
)
def test_killed_inside_a_save_the_run_goes_on_as_if_it_had_not_been(
    tmp_path: Path, corpus: Path, short: dict[str, Any], point: str
) -> None:
    run = new_run(tmp_path / "run", corpus, train={"save_every": 2, "keep": 1})
    process = start(run, point)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL, Path(f"{run.folder}.out").read_text()
    assert_resumable(run)
    newest = checkpoint.newest(run.checkpoints)
    assert newest is not None
    assert checkpoint.step_of(newest) == (4 if point in ("after the rename", "in the delete") else 2)
    assert train(run, task_of(run), resume=True) == 0
    assert record(run) == short
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000006"]  # and nothing half


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)])
def test_a_signal_ends_the_run_with_a_checkpoint_and_its_own_code(
    tmp_path: Path, corpus: Path, number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path / "run", corpus, train={"steps": 100_000, "save_every": 50_000, "valid_every": 50_000})
    process = start(run)
    wait_for_steps(run, 3, process)

    # Meanwhile the folder is taken.
    assert main(["train", "--resume", str(run.folder)]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 3
    assert f"in use by process {process.pid}" in shown[0]
    assert str(run.folder) in shown[1]
    with pytest.raises(InputError, match="in use"), locked(run.folder):
        pass

    before = time.monotonic()
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == code
    assert time.monotonic() - before < 30
    assert [checkpoint.find_fault(path) for path in checkpoint.steps(run.checkpoints)] == [None]
    last = checkpoint.load(checkpoint.steps(run.checkpoints)[-1])
    assert last.step == read_metrics(run.folder)[-1]["step"] >= 3
    assert f"--resume {run.folder}" in Path(f"{run.folder}.out").read_text()
    with locked(run.folder):  # and now it is free
        assert (run.folder / "lock").read_text() == str(os.getpid())


def test_the_lock_of_a_killed_run_is_taken_over(tmp_path: Path, corpus: Path) -> None:
    run = new_run(tmp_path / "run", corpus, train={"steps": 100_000})
    process = start(run)
    wait_for_steps(run, 1, process)
    process.kill()
    process.join(60)
    assert (run.folder / "lock").read_text() == str(process.pid)
    with locked(run.folder):
        assert (run.folder / "lock").read_text() == str(os.getpid())


def change_config(run: Run, **values: int) -> None:
    path = run.folder / "config.toml"
    text = path.read_text()
    for name, value in values.items():
        text = re.sub(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
    path.write_text(text)


@pytest.mark.slow
def test_a_stop_never_leaves_a_damaged_checkpoint_alone(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(tmp_path / "run", corpus, train={"steps": 100_000, "save_every": 4, "keep": 2})
    with monkeypatch.context() as patch:
        stop_after(patch, 8)
        assert train(run, task_of(run)) == 143
    change_config(run, keep=1, save_every=50_000)
    weights = checkpoint.path_of(run.checkpoints, 8) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    process = start(run)
    wait_for_steps(run, 10, process)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 143
    faults = {checkpoint.step_of(path): checkpoint.find_fault(path) for path in checkpoint.steps(run.checkpoints)}
    assert list(faults) == [4, 8, read_metrics(run.folder)[-1]["step"]]
    assert [fault is None for fault in faults.values()] == [True, False, True]
    out = Path(f"{run.folder}.out").read_text()
    assert "resumed at step 4" in out
    assert "stopped by a signal" in out


@pytest.mark.slow
def test_a_disk_that_fills_between_saves_ends_the_run_and_loses_nothing(
    tmp_path: Path, corpus: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"train": {"steps": 18, "save_every": 10, "layers_every": 1, "keep": 9}}
    whole, run = new_run(tmp_path / "whole", corpus, **options), new_run(small_disk / "run", corpus, **options)
    assert train(whole, task_of(whole)) == 0
    filler, real, taken = small_disk / "filler", Stepper.step, 0

    def fill(*arguments: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken == 11:
            while not checkpoint.path_of(run.checkpoints, 10).exists():
                time.sleep(0.01)
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "step", fill)
        assert main(["train", "--resume", str(run.folder)]) == 2
    what, where, fix = capsys.readouterr().err.splitlines()[-3:]
    assert what == "kilolayer: the file cannot be written: no space left on device"
    assert where.strip() in (str(run.folder / "metrics.jsonl"), str(run.folder / "log.txt"))
    assert "free some space" in fix
    kept = checkpoint.steps(run.checkpoints)
    assert [(checkpoint.step_of(path), checkpoint.find_fault(path)) for path in kept] == [(10, None)]
    filler.unlink()
    assert train(run, task_of(run), resume=True) == 0
    assert record(run) == record(whole)


def test_a_save_on_a_full_disk_tells_what_it_needs(corpus: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = new_run(small_disk / "run", corpus, train={"steps": 8, "save_every": 1, "keep": 9, "log_every": 1})
    (small_disk / "filler").write_bytes(bytes(3 << 20))
    assert main(["train", "--resume", str(run.folder)]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert re.search("the checkpoint of step . could not be written: No space left on device", shown[-3])
    told = re.search("it needs ([0-9.]+) KiB, and ([0-9.]+) (KiB|B) are free; .* Older checkpoints are intact", shown[-1])
    assert told
    assert float(told[2]) / (1 if told[3] == "KiB" else 1024) < float(told[1])  # blocks and headers are counted
    assert "df -i" not in shown[-1]
    assert all(checkpoint.find_fault(path) is None for path in checkpoint.steps(run.checkpoints))
    assert not [path for path in run.checkpoints.iterdir() if path.name.startswith(".")]


def resume_as_nobody(folder: str, out: str) -> None:
    """What a child does: another user, who may read the run, goes on with it."""
    os.environ["KILOLAYER_CACHE"] = f"{Path(folder).parent}/cache"
    file = os.open(out, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 2)
    ThreadPool(1).close()  # imported now: Python itself may lie where that user cannot read
    os.setgid(65534)
    os.setuid(65534)
    sys.exit(main(["train", "--resume", folder]))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to become another user")
@pytest.mark.parametrize("unreadable", ["checkpoints", "metrics.jsonl"])
def test_the_run_of_another_user_is_refused_by_its_path(unreadable: str) -> None:
    with tempfile.TemporaryDirectory() as made:  # the folders of pytest are its user's own
        outer = Path(made)
        outer.chmod(0o777)
        run = new_run(outer / "run", write_corpus(outer), train={"steps": 4, "save_every": 2})
        assert train(run, task_of(run)) == 0
        (run.folder / "lock").touch()
        if unreadable:
            # All else may be written, so that this is what is met.
            for path in (run.folder, *run.folder.rglob("*")):
                path.chmod(0o777 if path.is_dir() else 0o666)
            (run.folder / unreadable).chmod(0)
        before = sorted(path.name for path in run.checkpoints.iterdir())
        process = SERVER.Process(target=resume_as_nobody, args=(str(run.folder), str(outer / "out")))
        process.start()
        process.join(60)
        shown = (outer / "out").read_text()
        assert process.exitcode == 2, shown
        assert "Traceback" not in shown
        assert "permission denied" in shown
        assert str(run.folder / unreadable) in shown
        assert sorted(path.name for path in run.checkpoints.iterdir()) == before
