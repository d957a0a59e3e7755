"""Times Kilolayer beside TorchScale, x-transformers, Hugging Face's transformers and torch.nn.Transformer on one GPU.

    sh benchmarks/speed/peers.sh PEERS
    PYTHONPATH=src:PEERS python benchmarks/speed/run.py benchmarks/speed

Each system and setting is a process of its own. As many as fit the GPU's memory together get ready (build, compile, record)
side by side; then each measures while all others stand still. `--tiny` tries every path on any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jobs import JOBS, ROWS, Job, jobs_of, tiny
from table import goals, markdown

import kilolayer

MEMORY = 130  # GB of the GPU that jobs may take together
SIDE_BY_SIDE = 6
READY_SECONDS, MEASURE_SECONDS = 200.0, 60.0
NO_MEMORY = ("out of memory", "ALLOC_FAILED")
PEERS = ("torch", "triton", "transformers", "torchscale", "x-transformers")


@dataclass
class Worker:
    """A job's process, which waits on stdin when it is ready."""

    job: Job
    process: subprocess.Popen[bytes]
    report: Path
    log: Path

    @classmethod
    def start(cls, job: Job, scratch: Path) -> Worker:
        folder = Path(tempfile.mkdtemp(dir=scratch))
        report, log = folder / "report.json", folder / "log.txt"
        cache = folder if job.alone else scratch
        order = {"job": asdict(job), "report": str(report), "started": time.time()}
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("measure.py")), json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **caches, "HF_HUB_OFFLINE": "1"},
            )
        return cls(job, process, report, log)

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def ready(self) -> bool:
        return self.ended or self.report.exists()

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def measure(self, seconds: float) -> dict[str, Any]:
        """Let it measure to its end; what it reported, and the reason where it failed."""
        reason = None
        if not self.ready:
            reason = "not ready in time"
        elif not self.ended:
            try:
                self.process.communicate(b"\n", timeout=max(1.0, seconds))
            except subprocess.TimeoutExpired:
                reason = "its measurement took too long"
        self.stop()
        facts = json.loads(self.report.read_text()) if self.report.exists() else {}
        if reason is None and self.process.returncode:
            lines = [line.strip() for line in self.said.splitlines() if line.strip()]
            reason = next((line for line in reversed(lines) if "Error" in line), f"exit code {self.process.returncode}")[:200]
        return facts if reason is None else facts | {"reason": reason.replace("|", "/")}

    def stop(self) -> None:
        """End the process and those that compile for it."""
        if not self.ended:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Results:
    """The documents in the folder `out`, written anew after each job. Rows that this run does not measure stay as they are."""

    def __init__(self, out: Path, rows: list[int]) -> None:
        out.mkdir(parents=True, exist_ok=True)
        words = ["OUT" if Path(word) == out else word for word in sys.argv[1:]]
        (out / "log.txt").unlink(missing_ok=True)
        self.out, self.start = out, time.monotonic()
        self.run: dict[str, Any] = {
            # PEERS: the folder that peers.sh fills
            "command": shlex.join(["PYTHONPATH=src:PEERS", "python", "benchmarks/speed/run.py", *words]),
            "hardware": "unknown hardware",
            "versions": versions(),
            "rows": rows,
            "jobs": {},
        }
        path = out / "results.json"
        before = json.loads(path.read_text())["runs"] if path.exists() else []
        others = [{**run, "rows": [row for row in run["rows"] if row not in rows]} for run in before]
        self.runs = [*(run for run in others if run["rows"]), self.run]

    def add(self, job: Job, facts: dict[str, Any], said: str = "") -> None:
        """Keep what a job found; its profile, and what it said where it failed, go to files of their own."""
        if "reason" in facts:
            with (self.out / "log.txt").open("a") as log:
                log.write(f"== {job.name}: {facts['reason']}\n{said[-4000:]}\n")
        if "profile" in facts:
            (self.out / f"profile-{job.profile}.txt").write_text(facts.pop("profile"))
        self.run["hardware"] = facts.pop("hardware", self.run["hardware"])
        self.run["jobs"][job.name] = facts
        self.run["seconds"] = time.monotonic() - self.start
        self.run["goals"] = {row: goals(row, self.run["jobs"]) for row in self.run["rows"]}
        (self.out / "results.json").write_text(json.dumps({"runs": self.runs}, indent=1) + "\n")
        (self.out / "results.md").write_text(markdown(self.runs))
        found = facts.get("reason") or facts.get("ms") or facts.get("times")
        print(f"{self.run['seconds']:5.0f} s  {job.name}: {found}", flush=True)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "kilolayer": kilolayer.__version__}
    for package in PEERS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def groups(jobs: list[Job]) -> Iterator[list[Job]]:
    """Neighbours that fit the GPU together; a job that wants to be alone is."""
    group: list[Job] = []
    for job in jobs:
        full = sum(each.gigabytes for each in (*group, job)) > MEMORY or len(group) == SIDE_BY_SIDE
        if group and (full or job.alone or group[-1].alone):
            yield group
            group = []
        group.append(job)
    if group:
        yield group


def run_group(group: list[Job], scratch: Path, end: float) -> Iterator[tuple[Worker, dict[str, Any]]]:
    """Start all, wait until all are ready, then let one after the other measure."""
    workers: list[Worker] = []
    try:
        workers += [Worker.start(job, scratch) for job in group]
        limit = min(time.monotonic() + READY_SECONDS, end)
        while not all(worker.ready for worker in workers) and time.monotonic() < limit:
            time.sleep(0.1)
        for worker in sorted(workers, key=lambda each: each.ready):  # those that are late end first
            yield worker, worker.measure(min(MEASURE_SECONDS, end - time.monotonic()))
    finally:
        for worker in workers:
            worker.stop()


def run(jobs: list[Job], results: Results, end: float) -> None:
    """All jobs in their order. One that found too little memory beside others gets another try alone, at the end."""
    queue = list(groups(jobs))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        while queue:
            group = queue.pop(0)
            if time.monotonic() > end:
                for job in group:
                    results.add(job, {"reason": "not started: the time was up"})
                continue
            for worker, facts in run_group(group, Path(scratch), end):
                results.add(worker.job, facts, worker.said)
                if "reason" in facts and len(group) > 1 and any(words in worker.said for words in NO_MEMORY):
                    queue.append([worker.job])


def main() -> None:
    parser = argparse.ArgumentParser(description="Training and decoding speed beside the peers'.")
    parser.add_argument("out", type=Path, help="folder for results.json, results.md, profiles, and log.txt where a job failed")
    parser.add_argument("--rows", type=int, nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--jobs", nargs="+", choices=[job.name for job in JOBS], metavar="JOB", help="these alone, of no row")
    parser.add_argument("--seconds", type=float, default=530, help="start nothing after so long, and end what runs")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try every path")
    options = parser.parse_args()
    results = Results(options.out, [] if options.jobs else options.rows)
    chosen = [job for job in JOBS if job.name in options.jobs] if options.jobs else jobs_of(options.rows)
    run([tiny(job) if options.tiny else job for job in chosen], results, results.start + options.seconds)
    print((options.out / "results.md").read_text())


if __name__ == "__main__":
    main()
