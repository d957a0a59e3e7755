"""The processes that torchrun starts: killed, stopped, and told of mistakes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kilolayer.config import dump, merge
from kilolayer.runs.metrics import read_metrics
from kilolayer.runs.run import Run
from tests.fixtures.small_runs import last_checkpoint, new_run, record, table

pytestmark = pytest.mark.slow

TRAIN = {"steps": 40, "save_every": 3, "valid_every": 9, "layers_every": 5}
FORMS: dict[str, dict[str, Any]] = {
    "experts": {"model": {"dropout": 0.1, "moe": {"experts": 4}}, "train": TRAIN},
    "shards": {"model": {"dropout": 0.1}, "train": {**TRAIN, "shard": "full"}},
}
"""What the processes share."""


STARTED: list[subprocess.Popen[str]] = []


def start(*words: str, restarts: int = 2) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(restarts)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [*command, "-m", "--", "kilolayer", "train", *words], env=environment, stderr=-1, stdout=-1, text=True
    )
    STARTED.append(process)
    return process


@pytest.fixture(autouse=True)
def _none_is_left():
    """What a failed test leaves behind ends with its torchrun."""
    yield
    while STARTED:
        with STARTED.pop() as process:
            process.kill()


def wait_for_step(run: Run, step: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 60
    while max((row["step"] for row in read_metrics(run.folder)), default=0) < step:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> dict[str, Any]:
    return FORMS[request.param]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path, form: dict[str, Any]) -> dict[str, Any]:
    run = new_run(tmp_path_factory.mktemp("undisturbed") / "run", corpus, **form)
    process = start("--resume", str(run.folder))
    _, told = process.communicate(timeout=60)
    assert process.returncode == 0, told
    return record(run)


@pytest.mark.parametrize("first", [True, False])
def test_killed_they_start_again_and_end_with_the_same_bits(
    tmp_path: Path, corpus: Path, form: dict[str, Any], undisturbed: dict[str, Any], first: bool
) -> None:
    run = new_run(tmp_path / "run", corpus, **form)
    process = start("--resume", str(run.folder))
    wait_for_step(run, 5, process)
    holder = int((run.folder / "lock").read_text().split()[0])
    others = [pid for pid in children_of(process.pid) if pid != holder]
    os.kill(holder if first else others[0], signal.SIGKILL)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    assert "resumed at step" in told
    assert "bug in Kilolayer" not in told
    assert record(run) == undisturbed


def test_a_new_run_goes_on_after_a_restart(
    tmp_path: Path, corpus: Path, form: dict[str, Any], undisturbed: dict[str, Any]
) -> None:
    (config := tmp_path / "small.toml").write_text(dump(table(corpus, **form)))
    folder = tmp_path / "run"
    process = start(str(config), "--run", str(folder), restarts=1)
    while not (folder / "config.toml").exists():
        assert process.poll() is None
        time.sleep(0.05)
    wait_for_step(Run.open(folder), 5, process)
    os.kill(int((folder / "lock").read_text().split()[0]), signal.SIGKILL)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    assert "resumed at step" in told
    assert record(Run.open(folder)) == undisturbed
    process = start(str(config), "--run", str(folder), restarts=1)
    _, told = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "the run folder is not empty" in told  # another launch begins nothing in it, and goes on with nothing


def children_of(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def test_a_signal_to_torchrun_ends_the_run_with_a_checkpoint(
    tmp_path: Path, corpus: Path, form: dict[str, Any], undisturbed: dict[str, Any]
) -> None:
    run = new_run(tmp_path / "run", corpus, **form)
    process = start("--resume", str(run.folder))
    wait_for_step(run, 5, process)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert told.count("stopped by a signal") == 1
    assert last_checkpoint(run).step == read_metrics(run.folder)[-1]["step"] >= 5
    _, told = (process := start("--resume", str(run.folder))).communicate(timeout=60)
    assert process.returncode == 0, told
    assert record(run) == undisturbed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_when_torchrun_is_killed_its_processes_end_with_a_checkpoint(
    tmp_path: Path, corpus: Path, form: dict[str, Any], number: signal.Signals
) -> None:
    """With or without a signal to it before."""
    sections = merge(form, {"train": {"steps": 100_000}})
    run = new_run(tmp_path / "run", corpus, **sections)
    process = start("--resume", str(run.folder))
    wait_for_step(run, 5, process)
    workers = children_of(process.pid)
    assert len(workers) == 2
    if number == signal.SIGHUP:
        process.send_signal(number)
    process.kill()
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert last_checkpoint(run).step == read_metrics(run.folder)[-1]["step"] >= 5


@pytest.mark.parametrize("frozen", [0, 1])
def test_one_that_stands_still_is_named_and_ends_the_run(
    tmp_path: Path, corpus: Path, form: dict[str, Any], frozen: int
) -> None:
    run = new_run(tmp_path / "run", corpus, **merge(form, {"train": {"steps": 100_000, "timeout": 4.0}}))
    process = start("--resume", str(run.folder), restarts=0)
    wait_for_step(run, 5, process)
    holder = int((run.folder / "lock").read_text().split()[0])
    workers = children_of(process.pid)
    still = next(pid for pid in workers if (pid == holder) == (frozen == 0))
    before = time.monotonic()
    os.kill(still, signal.SIGSTOP)
    _, told = process.communicate(timeout=90)
    assert process.returncode != 0
    assert told.count(f"process {frozen} has made no progress since step ") == 1, told
    assert "train.timeout" in told
    assert time.monotonic() - before < 4 + 45  # torchrun waits for thirty seconds before it kills one that does not answer
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_a_mistake_is_told_once() -> None:
    process = start("--rin", "runs/a", restarts=0)
    _, told = process.communicate(timeout=60)
    assert process.returncode != 0
    assert told.count("unknown option '--rin'; did you mean '--run'?") == 1
