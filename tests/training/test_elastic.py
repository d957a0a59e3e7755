"""torchrun starts processes again: after kill -9 at any moment, and with another number of hosts."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kilolayer.config import dump, merge
from kilolayer.runs import checkpoint
from kilolayer.runs.metrics import read_metrics
from kilolayer.runs.run import Run
from tests.fixtures.small_runs import record, table

pytestmark = pytest.mark.slow

STEPS = 1000
TABLES: dict[str, Any] = {"train": {"steps": STEPS, "save_every": 5, "valid_every": 500, "layers_every": 0, "log_every": 10}}
QUICK = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"


class Hosts:
    """torchruns of one launch, each with its processes in a group of its own, which a lost host takes with it."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.folder, self.words, self.started = folder, words, []
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self.port = free.getsockname()[1]

    def start(self, name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "2"]
        command += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{self.port}"]
        command += ["--rdzv-id", "job", "--rdzv-conf", QUICK, "--local-addr", "localhost", "-m", "--", "kilolayer", "train"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # with a shared store, torch lets no host join later
        with (self.folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                [*command, *self.words], env=environment, stderr=log, stdout=log, text=True, process_group=0
            )
        self.started.append(process)
        return process

    def answer(self) -> bool:
        """Whether the torchrun that keeps the rendezvous, the first to be started, does so."""
        with socket.socket() as asked:
            return asked.connect_ex(("localhost", self.port)) == 0

    def lose(self, process: subprocess.Popen[str]) -> None:
        """Kill a torchrun and its processes at once."""
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in [process.pid, *map(int, workers)]:
            os.kill(pid, signal.SIGKILL)
        process.wait()

    def told(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()}" for log in sorted(self.folder.glob("*.log")))


@pytest.fixture
def hosts(tmp_path: Path, corpus: Path) -> Iterator[Hosts]:
    (config := tmp_path / "small.toml").write_text(dump(table(corpus, **TABLES)))
    found = Hosts(tmp_path, [str(config), "--run", str(tmp_path / "run")])
    yield found
    for process in found.started:
        if process.poll() is None:
            found.lose(process)


def checkpoint_of(folder: Path) -> Path:
    return checkpoint.path_of(folder / "checkpoints", STEPS)


def last_step(folder: Path) -> int:
    return max((row["step"] for row in read_metrics(folder)), default=0) if (folder / "metrics.jsonl").exists() else 0


def wait(hosts: Hosts, condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, hosts.told()
        time.sleep(0.05)


@pytest.mark.parametrize("shard", ["none", "full"])
def test_a_lost_host_is_done_without_and_may_come_back(hosts: Hosts, tmp_path: Path, shard: str) -> None:
    """With shards, the rows of four processes are shared by the two that are left, and then by four again."""
    folder = tmp_path / "run"
    hosts.words += ["--train.shard", shard]
    first = hosts.start("first")
    wait(hosts, hosts.answer)
    second = hosts.start("second")
    wait(hosts, lambda: last_step(folder) > 20)
    hosts.lose(second)
    lost = last_step(folder)
    wait(hosts, lambda: hosts.told().count("resumed at step") == 1 and last_step(folder) > lost + 10)
    again = hosts.start("again")
    wait(hosts, lambda: hosts.told().count("resumed at step") == 2)
    assert last_step(folder) < STEPS - 100
    assert first.wait(400) == 0, hosts.told()
    assert again.wait(60) == 0, hosts.told()
    assert last_step(folder) == STEPS
    assert (folder / "scores.json").exists()
    assert len(list(checkpoint_of(folder).glob("model*"))) == (1 if shard == "none" else 4)
    with pytest.raises(ProcessLookupError):
        os.killpg(second.pid, 0)


MOMENTS = 10
SHORT: dict[str, Any] = {
    "model": {"dropout": 0.1},
    "train": {"steps": 60, "save_every": 4, "valid_every": 20, "layers_every": 10},
}
FORMS: dict[str, dict[str, Any]] = {"whole": SHORT, "shards": merge(SHORT, {"train": {"shard": "full"}})}


def four_processes(corpus: Path, folder: Path, form: str) -> subprocess.Popen[str]:
    (config := folder / "small.toml").write_text(dump(table(corpus, **FORMS[form])))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "--max-restarts", "2"]
    command += ["-m", "--", "kilolayer", "train", str(config), "--run", str(folder / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, env=environment, stderr=-1, stdout=-1, text=True)


def children_of(parent: int) -> list[int]:
    """None of a process that has ended, as a run may before its last moments."""
    try:
        return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except FileNotFoundError:
        return []


@pytest.fixture(scope="module", params=FORMS)
def undisturbed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, corpus: Path
) -> tuple[str, dict[str, Any], float]:
    """A form of FORMS, what such a run leaves that nobody kills, and its seconds."""
    folder, began = tmp_path_factory.mktemp("undisturbed"), time.monotonic()
    process = four_processes(corpus, folder, request.param)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    return request.param, record(Run.open(folder / "run")), time.monotonic() - began


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_killed_at_a_random_moment_it_ends_as_if_undisturbed(
    tmp_path: Path, corpus: Path, undisturbed: tuple[str, dict[str, Any], float], moment: int
) -> None:
    """The moments are spread over the whole run: while modules are imported, text is prepared, steps are taken, scores made."""
    draw, (form, expected, seconds) = random.Random(moment), undisturbed
    process = four_processes(corpus, tmp_path, form)
    end = time.monotonic() + seconds * (moment + draw.random()) / MOMENTS
    while time.monotonic() < end or (process.poll() is None and len(children_of(process.pid)) < 4):
        time.sleep(0.01)
    workers = children_of(process.pid)
    if workers:
        os.kill(draw.choice(workers), signal.SIGKILL)
    _, told = process.communicate(timeout=60 + 4 * seconds)
    assert process.returncode == 0, told
    assert record(Run.open(tmp_path / "run")) == expected
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
