"""The queue of a comparison: what is started, waited for, stopped and gone on with. Its processes stand for runs."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kilolayer.cli.compare import summary
from kilolayer.cli.main import main
from kilolayer.compare import queue
from kilolayer.compare.comparison import Comparison
from kilolayer.compare.grid import Axis
from kilolayer.compare.machine import THREADS, Demand, Device
from kilolayer.compare.queue import run_all
from kilolayer.config import dump
from kilolayer.errors import InputError, KilolayerError
from kilolayer.runs.lock import holder_of, locked
from tests.fixtures.small_runs import text_table

FAKE = Path(__file__).parent / "fake_train.py"
PARENT = """
import sys
from pathlib import Path
from kilolayer.compare import queue
from kilolayer.compare.comparison import Comparison
queue.TRAIN = (sys.argv[2],)
comparison = Comparison.open(Path(sys.argv[1]))
print("ready", flush=True)
sys.exit(queue.run_all(comparison, parallel=2))
"""


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(queue, "TRAIN", (str(FAKE),))
    monkeypatch.setattr(queue, "POLL_SECONDS", 0.02)
    monkeypatch.setenv("FAKE_EVENTS", str(tmp_path / "events.jsonl"))
    return tmp_path / "events.jsonl"


def made(tmp_path: Path, corpus: Path, steps: int = 3, **values: Any) -> Comparison:
    (tmp_path / "base.toml").write_text(dump(text_table(corpus, train={"steps": steps})))
    axes = [Axis(f"train.{name}", tuple(each)) for name, each in values.items()]
    return Comparison.make(tmp_path / "comparison", tmp_path / "base.toml", axes)


def read(events: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []


def counted(events: Path, event: str) -> Counter[str]:
    return Counter(entry["run"] for entry in read(events) if entry["event"] == event)


def outcomes(comparison: Comparison) -> dict[str, str]:
    return {result.name: result.outcome.text for result in comparison.results()}


def most_at_once(events: Path, gpu: str | None = None) -> int:
    entries = [entry for entry in read(events) if gpu in (None, entry["gpu"])]
    changes = sorted((entry["time"], -1 if entry["event"] in ("finished", "stopped") else 1) for entry in entries)
    running, most = 0, 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def test_every_run_is_trained_once_and_no_more_at_once_than_allowed(tmp_path: Path, corpus: Path, events: Path) -> None:
    comparison = made(tmp_path, corpus, lr=[1e-3, 2e-3, 4e-3], seed=[1, 2])
    assert run_all(comparison, parallel=3) == 0
    assert set(outcomes(comparison).values()) == {"finished"}
    assert counted(events, "started") == Counter(member.name for member in comparison.members)
    assert 2 <= most_at_once(events) <= 3
    assert run_all(comparison) == 0
    assert len(read(events)) == 12  # a start and an end each, and none again


def test_the_longest_runs_go_first(tmp_path: Path, corpus: Path, events: Path) -> None:
    comparison = made(tmp_path, corpus, steps=1, accumulate=[1, 4, 2])
    assert run_all(comparison, parallel=1) == 0
    assert list(counted(events, "started")) == ["accumulate4", "accumulate2", "accumulate1"]


def test_the_first_run_is_alone_until_it_has_a_configuration_and_cores_are_shared(
    tmp_path: Path, corpus: Path, events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kilolayer.compare.machine.cores", lambda: 7)
    for name in THREADS:
        monkeypatch.delenv(name, raising=False)
    comparison = made(tmp_path, corpus, seed=[1, 2, 3])
    assert run_all(comparison, parallel=3) == 0
    starts = [entry["time"] for entry in read(events) if entry["event"] == "started"]
    first = (comparison.members[0].folder / "config.toml").stat().st_mtime
    assert starts[0] <= first + 0.1 < starts[1]
    assert {entry["threads"] for entry in read(events)} == {"2"}


def test_runs_have_the_number_of_threads_that_the_user_has_set(
    tmp_path: Path, corpus: Path, events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kilolayer.compare.machine.cores", lambda: 7)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run_all(made(tmp_path, corpus, seed=[1, 2]), parallel=2) == 0
    assert {entry["threads"] for entry in read(events)} == {"1"}


def test_runs_that_share_a_gpu_are_told_of_the_multi_process_service_once(
    tmp_path: Path, corpus: Path, events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "devices_for", lambda kinds: [Device("cuda", None)])
    monkeypatch.setattr(queue, "demand_of", lambda config, plans: Demand("cuda", 3.0, 1.0))
    monkeypatch.setattr(queue, "takes_turns", lambda: True)
    lines: list[str] = []
    assert run_all(made(tmp_path, corpus, seed=[1, 2, 3]), parallel=3, write_line=lines.append) == 0
    assert len([line for line in lines if queue.MPS in line]) == 1
    lines.clear()
    (tmp_path / "alone").mkdir()
    assert run_all(made(tmp_path / "alone", corpus, seed=[1, 2]), parallel=1, write_line=lines.append) == 0
    assert not [line for line in lines if queue.MPS in line]


@pytest.mark.slow
def test_each_of_several_gpus_takes_its_share(
    tmp_path: Path, corpus: Path, events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [Device("cuda", 8.0, {"CUDA_VISIBLE_DEVICES": name}) for name in ("3", "5")]
    monkeypatch.setattr(queue, "devices_for", lambda kinds: gpus)
    monkeypatch.setattr(queue, "demand_of", lambda config, plans: Demand("cuda", 3.0, 1.0))
    assert run_all(made(tmp_path, corpus, seed=list(range(1, 7))), parallel=6) == 0
    assert {entry["gpu"] for entry in read(events)} == {"3", "5"}
    for gpu in ("3", "5"):
        assert most_at_once(events, gpu) <= 2  # of size 3 into 8


def test_the_exit_code_tells_of_a_run_that_failed_and_not_of_one_that_diverged(
    tmp_path: Path, corpus: Path, events: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = made(tmp_path, corpus, lr=[1e-3, 2.0])
    assert main(["compare", str(comparison.folder)]) == 0
    assert outcomes(comparison) == {"lr0.001": "finished", "lr2": "diverged at step 1"}
    capsys.readouterr()
    assert main(["compare", str(comparison.folder), "--set", "train.seed=1,13", "--json"]) == 1
    kinds = [run["outcome"]["kind"] for run in json.loads(capsys.readouterr().out)["runs"]]
    assert sorted(kinds) == ["diverged", "diverged", "failed", "finished"]


def test_a_run_that_dies_or_breaks_is_a_result(tmp_path: Path, corpus: Path, events: Path) -> None:
    comparison = made(tmp_path, corpus, lr=[1e-3, 2.0], seed=[1, 13])
    assert run_all(comparison, parallel=2) == 0
    found = outcomes(comparison)
    assert found["lr0.001-seed1"] == "finished"
    assert found["lr0.001-seed13"] == "failed: ZeroDivisionError: division by zero"
    assert {found["lr2-seed1"], found["lr2-seed13"]} == {"diverged at step 1"}
    again = Comparison.open(comparison.folder)
    assert outcomes(again) == found
    run_all(again, parallel=2)
    tried = counted(events, "started") + counted(events, "resumed")
    assert tried == {"lr0.001-seed1": 1, "lr0.001-seed13": 2, "lr2-seed1": 1, "lr2-seed13": 1}


def test_what_the_first_run_is_refused_for_is_told_and_nothing_else_is_started(
    tmp_path: Path, corpus: Path, events: Path
) -> None:
    comparison = made(tmp_path, corpus, seed=[15, 1, 2])
    with pytest.raises(InputError) as refused:
        run_all(comparison, parallel=3)
    assert (refused.value.what, refused.value.fix) == ("the text is empty", "give files with text")
    assert "in train.txt" in refused.value.where
    assert list(counted(events, "started")) == ["seed15"]


@pytest.mark.slow
def test_a_run_without_memory_beside_others_is_tried_again_alone(tmp_path: Path, corpus: Path, events: Path) -> None:
    comparison = made(tmp_path, corpus, steps=20, seed=[1, 14, 2])  # a second: the others are still there
    assert run_all(comparison, parallel=3) == 0
    assert set(outcomes(comparison).values()) == {"finished"}
    assert counted(events, "resumed") == {"seed14": 1}


def test_after_the_seconds_runs_stop_with_a_checkpoint_and_the_next_queue_goes_on(
    tmp_path: Path, corpus: Path, events: Path
) -> None:
    comparison = made(tmp_path, corpus, steps=30, seed=[1, 2, 3])
    assert run_all(comparison, parallel=2, seconds=1.0) == 0
    assert {result.outcome.kind for result in comparison.results()} == {"unfinished", "waiting"}
    assert counted(events, "stopped") == counted(events, "started")
    assert run_all(comparison, parallel=3) == 0
    assert set(outcomes(comparison).values()) == {"finished"}
    assert counted(events, "finished") == counted(events, "started") == {"seed1": 1, "seed2": 1, "seed3": 1}
    steps = [row["step"] for row in comparison.results()[0].train]
    assert steps == list(range(1, 31))


def test_a_run_with_a_fading_stack_that_is_stopped_is_not_dead(
    tmp_path: Path, corpus: Path, events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = made(tmp_path, corpus, steps=400, seed=[16, 1, 2])

    def seconds() -> float:
        written = [(member.folder / "metrics.jsonl") for member in comparison.members[:2]]
        return 9.0 if all(path.exists() for path in written) and '"fading"' in written[0].read_text() else 0.0

    monkeypatch.setattr(queue, "time", SimpleNamespace(monotonic=seconds, sleep=time.sleep))
    told: list[str] = []
    assert run_all(comparison, parallel=2, seconds=5, write_line=told.append) == 0
    assert re.fullmatch(r"seed16: stopped at step \d+ of 400", told[-2])
    assert re.fullmatch(r"seed1: stopped at step \d+ of 400", told[-1])
    assert summary(comparison) == "3 runs: 3 not finished"


def test_a_run_that_death_has_ended_is_a_result_and_is_not_tried_again(tmp_path: Path, corpus: Path, events: Path) -> None:
    comparison = made(tmp_path, corpus, stop_when_dead=[True], seed=[16, 1])
    assert run_all(comparison, parallel=2) == 0
    assert run_all(comparison, parallel=2) == 0
    assert list(outcomes(comparison).values()) == ["encoder dying, ended at step 2", "finished"]
    assert counted(events, "started") == {"stop_when_dead=true-seed16": 1, "stop_when_dead=true-seed1": 1}
    assert not counted(events, "resumed")
    assert not comparison.failures()


def test_runs_that_fail_alike_before_their_first_step_end_the_comparison(tmp_path: Path, corpus: Path, events: Path) -> None:
    comparison = made(tmp_path, corpus, accumulate=[8, 9, 10], seed=[1, 2, 3])
    with pytest.raises(KilolayerError) as ended:
        run_all(comparison, parallel=1)
    # The longest, then what differs most from those that have failed, the shortest first.
    assert list(counted(events, "started")) == ["accumulate10-seed1", "accumulate8-seed3", "accumulate9-seed2"]
    reason = "torch._dynamo.exc.InternalTorchDynamoError: AssertionError: 9 layers"
    assert ended.value.what == f"3 runs failed in the same way before their first step: {reason}; 6 others are not started"
    log = comparison.folder / "logs" / "accumulate9-seed2.txt"
    assert str(log) in ended.value.where
    assert "Set TORCHDYNAMO_VERBOSE" in log.read_text()
    assert outcomes(comparison)["accumulate9-seed2"] == f"failed: {reason}"


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_failures_of_one_kind_of_run_end_nothing(tmp_path: Path, corpus: Path, events: Path, parallel: int) -> None:
    comparison = made(tmp_path, corpus, steps=1, accumulate=[8, 9, 10, 1])  # those that break are the longest
    for _ in range(2):  # and again, where they alone are left
        assert run_all(comparison, parallel=parallel) == 0
    assert Counter(result.outcome.kind for result in comparison.results()) == {"failed": 3, "finished": 1}


def stop_when_two_train(comparison: Comparison) -> None:
    while not all((member.folder / "metrics.jsonl").exists() for member in comparison.members[:2]):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_stops_the_runs_with_checkpoints(tmp_path: Path, corpus: Path, events: Path) -> None:
    comparison = made(tmp_path, corpus, steps=100, seed=[1, 2])
    threading.Thread(target=stop_when_two_train, args=(comparison,), daemon=True).start()
    assert run_all(comparison, parallel=2) == 128 + signal.SIGTERM
    assert counted(events, "stopped") == {"seed1": 1, "seed2": 1}
    assert {result.outcome.kind for result in comparison.results()} == {"unfinished"}


def test_two_queues_of_one_comparison_are_refused(tmp_path: Path, corpus: Path, events: Path) -> None:
    comparison = made(tmp_path, corpus, seed=[1, 2])
    with locked(comparison.folder), pytest.raises(InputError, match="in use by process"):
        run_all(comparison)


@pytest.mark.slow
def test_a_run_that_an_earlier_queue_has_started_is_waited_for(tmp_path: Path, corpus: Path, events: Path) -> None:
    comparison = made(tmp_path, corpus, steps=40, seed=[1, 2])  # two seconds: it must outlive the start of the queue
    first = comparison.members[0]
    with subprocess.Popen([sys.executable, str(FAKE), str(comparison.config_path(first)), "--run", str(first.folder)]):
        while holder_of(first.folder) is None:
            time.sleep(0.01)
        told: list[str] = []
        assert run_all(comparison, parallel=2, write_line=told.append) == 0
    assert "seed1: still running" in told
    assert counted(events, "started") == {"seed1": 1, "seed2": 1}
    assert set(outcomes(comparison).values()) == {"finished"}


@pytest.mark.slow
def test_a_run_that_an_earlier_queue_has_just_started_is_not_doubled(tmp_path: Path, corpus: Path, events: Path) -> None:
    comparison = made(tmp_path, corpus, steps=40, seed=[1, 2])  # two seconds: it must outlive the start of the queue
    first = comparison.members[0]
    # It has no lock yet: its process still begins.
    with subprocess.Popen([sys.executable, str(FAKE), str(comparison.config_path(first)), "--run", str(first.folder)]):
        assert run_all(comparison, parallel=2) == 0
    assert counted(events, "finished") == {"seed1": 1, "seed2": 1}
    assert set(outcomes(comparison).values()) == {"finished"}
    assert not comparison.failures()


@pytest.mark.slow
def test_runs_of_an_earlier_queue_are_stopped_too(tmp_path: Path, corpus: Path, events: Path) -> None:
    comparison = made(tmp_path, corpus, steps=200, seed=[1, 2])
    first = comparison.members[0]
    with subprocess.Popen([sys.executable, str(FAKE), str(comparison.config_path(first)), "--run", str(first.folder)]):
        while holder_of(first.folder) is None:
            time.sleep(0.01)
        assert run_all(comparison, parallel=2, seconds=1) == 0
        assert holder_of(first.folder) is None
    assert counted(events, "stopped") == {"seed1": 1, "seed2": 1}


@pytest.fixture
def parents() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for each in started:
        each.kill()
        each.wait()
        if each.stdout is not None:
            each.stdout.close()


def start_parent(comparison: Comparison) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PARENT, str(comparison.folder), str(FAKE)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.slow
def test_killed_at_random_moments_no_run_is_lost_or_trained_twice(
    tmp_path: Path, corpus: Path, events: Path, parents: list[subprocess.Popen[str]]
) -> None:
    comparison = made(tmp_path, corpus, steps=20, seed=range(1, 9))
    generator = random.Random(7)
    for _ in range(6):
        parent = start_parent(comparison)
        parents.append(parent)
        assert parent.stdout is not None
        parent.stdout.readline()
        time.sleep(generator.uniform(0.0, 2.0))
        parent.kill()
        parent.wait()
    assert run_all(comparison, parallel=2) == 0
    assert set(outcomes(comparison).values()) == {"finished"}
    assert counted(events, "finished") == Counter(member.name for member in comparison.members)
    for result in comparison.results():
        assert [row["step"] for row in result.train] == list(range(1, 21))
