"""What scripts under benchmarks keep when a command is killed, and with what the next one goes on."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@cache
def script(path: str) -> dict[str, Any]:
    """The names of a script, which is not run. It may look for others in its folder, and in those that it names."""
    before = list(sys.path)
    sys.path.insert(0, str((ROOT / "benchmarks" / path).parent))
    try:
        return runpy.run_path(str(ROOT / "benchmarks" / path))
    finally:
        sys.path[:] = before


def vision_jobs(names: list[str], rows: dict[str, Any], out: Path) -> list[str]:
    """The jobs that benchmarks/vision/run.py would train or score."""
    names_in = script("vision/run.py")
    every = {job.name: job for job in names_in["jobs"]()}
    return [job.name for job in names_in["needed"](names, rows, out, every)]


def has_folder(out: Path, name: str) -> None:
    (out / name).mkdir()
    (out / name / "config.toml").touch()


def test_an_image_classifier_starts_from_masked_images_that_went_to_their_end(tmp_path: Path) -> None:
    masked, tuned = "masked-sub_ln-12-1", "tuned-sub_ln-12-1"
    assert vision_jobs([tuned], {}, tmp_path) == [masked, tuned]
    assert vision_jobs([masked, tuned], {}, tmp_path) == [masked, tuned]
    has_folder(tmp_path, masked)
    assert vision_jobs([tuned], {masked: {"code": 130}}, tmp_path) == [masked, tuned]
    assert vision_jobs([tuned], {masked: {"code": 0}}, tmp_path) == [tuned]


def test_an_image_classifier_of_another_machine_is_not_trained_again(tmp_path: Path) -> None:
    scratch, masked, tuned = "scratch-sub_ln-12-1", "masked-sub_ln-12-1", "tuned-sub_ln-12-1"
    rows: dict[str, Any] = {scratch: {"code": 0}, masked: {"code": 0}}
    assert vision_jobs([scratch, masked], rows, tmp_path) == []
    assert vision_jobs([tuned], rows, tmp_path) == [masked, tuned]
    has_folder(tmp_path, scratch)
    assert vision_jobs([scratch], rows, tmp_path) == [scratch]  # the corrupted images are still to be measured
    rows[scratch] = {"code": 0, "corruptions": {"mean_corruption_error": 50.0}}
    assert vision_jobs([scratch], rows, tmp_path) == []


def test_a_run_that_was_cut_off_is_no_result_of_muon() -> None:
    names_in = script("muon/run.py")
    valid = [(25, 3.0), (50, 2.0)]
    assert names_in["final_loss"]({"valid": valid, "outcome": "finished"}) == 2.0
    assert names_in["final_loss"]({"valid": valid, "outcome": "diverged"}) == names_in["WORST"]
    jobs = list(names_in["wanted"](["enwik8"], {}))
    known = {job.name: {"valid": [(50, 2.0 + job.lr)], "outcome": "finished"} for job in jobs if job.optimizer == "muon"}
    best = [job for job in names_in["wanted"](["enwik8"], known) if job.lr == names_in["GRID"][0] and job.optimizer == "muon"]
    assert sorted((job.seed, job.share) for job in set(best)) == [(seed, share) for seed in (1, 2, 3) for share in (0.75, 1.0)]


def test_an_ablation_keeps_what_earlier_ones_measured(tmp_path: Path) -> None:
    names_in = script("speed/ablation.py")
    kept = ROOT / "benchmarks/speed/ablation.json"
    (tmp_path / "ablation.json").write_text(kept.read_text())
    line = {"job": "sparse, dropout 0.1", "package": "this", "repeat": 7, "cold": False, "left_out": [], "facts": {"ms": 30.0}}
    about = {"run": {"command": "another", "versions": {}, "kernels": ["group_sums"]}}
    (tmp_path / "ablation.jsonl").write_text(f"{json.dumps(about)}\n{json.dumps(line)}\n")
    before = json.loads(kept.read_text())
    for _ in range(2):
        names_in["write"](tmp_path)
    after = json.loads((tmp_path / "ablation.json").read_text())
    assert len(after["trials"]) == len(before["trials"]) + 1
    assert after["command"] == f"{before['command']}; another"
    assert {**after["cases"], "sparse, dropout 0.1": None} == {**before["cases"], "sparse, dropout 0.1": None}


CONTROL = """#!/bin/sh
[ "$1" = -d ] && echo "started $CUDA_MPS_PIPE_DIRECTORY" >> "$CALLS" && touch "$CUDA_MPS_PIPE_DIRECTORY/control" && exit
read words
echo "$words" >> "$CALLS"
echo 7 8
"""


def test_a_pool_starts_the_multi_process_service_once_and_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-cuda-mps-control").write_text(CONTROL)
    (tmp_path / "nvidia-cuda-mps-control").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "nowhere"))
    monkeypatch.setenv("CUDA_MPS_LOG_DIRECTORY", str(tmp_path / "nowhere"))
    start_service = script("mps.py")["start_service"]
    service = start_service()
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == service.environment["CUDA_MPS_PIPE_DIRECTORY"]
    assert start_service() is None  # it runs
    assert service.servers() == ["7", "8"]
    service.stop()
    started, *told = (tmp_path / "calls").read_text().splitlines()
    assert started == f"started {service.environment['CUDA_MPS_PIPE_DIRECTORY']}"
    assert told == ["get_server_list", "quit -t 5"]
    assert not Path(service.folder).exists()
    (tmp_path / "nvidia-cuda-mps-control").write_text("#!/bin/sh\nexit 1\n")
    assert start_service() is None  # it cannot be started, and the others go on


POOL = """
import json, sys, time
from pathlib import Path
from run_pool import Pool

if __name__ == "__main__":
    out = Path(sys.argv[1])
    pool = Pool(1, time.monotonic() + 500, out)
    lab = pool.lab(out / "study", True, [])
    runs = lab.compare_settings("two", lab.translation(train={"steps": 4}), [{"train.seed": 1}, {"train.seed": 2}])
    (out / "runs.json").write_text(json.dumps(runs))
    pool.leave()
"""


@pytest.mark.slow
def test_a_killed_pool_goes_on_and_replaces_a_process_that_died(tmp_path: Path) -> None:
    study = tmp_path / "study.py"
    study.write_text(POOL)
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "benchmarks")))
    command = [sys.executable, str(study), str(tmp_path / "out")]
    (tmp_path / "out").mkdir()

    def begin() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, start_new_session=True)

    first = begin()
    await_file(tmp_path / "out/comparisons/two/runs/seed1/config.toml")
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    second = begin()
    await_file(tmp_path / "out/comparisons/two/runs/seed1/scores.json")
    for worker in workers_of(second.pid):
        os.kill(worker, signal.SIGKILL)
    assert second.wait() == 0
    runs = json.loads((tmp_path / "out/runs.json").read_text())
    ended = json.loads((tmp_path / "out/ended.json").read_text())["runs"]
    assert {run["outcome"] for run in runs} <= {"finished", "no_progress"}
    assert {run["name"]: run["config"] for run in ended} == {run["name"]: run["config"] for run in runs}


def await_file(path: Path) -> None:
    end = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.05)


def workers_of(process: int) -> list[int]:
    """The processes that train runs, among the children of a process."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(each) for each in children if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()]
