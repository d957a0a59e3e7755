"""Run jobs in separate processes: as many as fit prepare in parallel, then each measures while all others are idle."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jobs import Job

import kilolayer

HERE = Path(__file__).parents[2]
MEMORY = 136  # GB of GPU memory that parallel jobs may take
READY_SECONDS, MEASURE_SECONDS = 200.0, 60.0
NO_MEMORY = ("out of memory", "ALLOC_FAILED")
PEERS = ("torch", "triton", "transformers", "torchscale", "x-transformers")


@dataclass(frozen=True)
class Trial:
    """A job to run once. package: the checkout of this repository whose `src` it imports.

    before: whether that is the older commit.
    cache: trials with the same name share a compile cache.
    cold: whether this one starts with an empty cache.
    """

    job: Job
    package: Path = HERE
    before: bool = False
    repeat: int = 0
    cache: str = "shared"
    cold: bool = False


@dataclass
class Worker:
    """A trial's process, which waits on stdin when it is ready."""

    trial: Trial
    process: subprocess.Popen[bytes]
    report: Path
    log: Path

    @classmethod
    def start(cls, trial: Trial, scratch: Path) -> Worker:
        folder = Path(tempfile.mkdtemp(dir=scratch))
        report, log = folder / "report.json", folder / "log.txt"
        cache = scratch / f"cache-{trial.cache}"
        if trial.cold:
            shutil.rmtree(cache, ignore_errors=True)
        package = str(trial.package.resolve() / "src")
        order = {"job": asdict(trial.job), "package": package, "report": str(report), "started": time.time()}
        environment = {
            "PYTHONPATH": os.pathsep.join([package, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "HF_HUB_OFFLINE": "1",
        }
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("measure.py")), json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | environment,
            )
        return cls(trial, process, report, log)

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def ready(self) -> bool:
        return self.ended or self.report.exists()

    @property
    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def measure(self, seconds: float) -> dict[str, Any]:
        """Let the process measure to its end; returns its report, and the reason if it failed."""
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
            lines = [line.strip() for line in self.log_text.splitlines() if line.strip()]
            reason = next((line for line in reversed(lines) if "Error" in line), f"exit code {self.process.returncode}")[:200]
        return facts if reason is None else facts | {"reason": reason.replace("|", "/")}

    def stop(self) -> None:
        """End the process and its compiler processes, which may outlive it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Lines:
    """A file with one line about the run, then one per trial as soon as it has ended; the output of failures goes to
    log.txt."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.log, self.start = path.with_name("log.txt"), time.monotonic()
        self.log.unlink(missing_ok=True)
        self.file = path.open("w")
        self._write({"run": about})

    def add(self, trial: Trial, facts: dict[str, Any], said: str = "") -> None:
        job, seconds = trial.job, time.monotonic() - self.start
        if "reason" in facts:
            with self.log.open("a") as log:
                log.write(f"== {job.name}: {facts['reason']}\n{said[-4000:]}\n")
        which = {
            "job": job.name,
            "package": "before" if trial.before else "this",
            "repeat": trial.repeat,
            "cold": trial.cold,
            "left_out": list(job.left_out),
        }
        self._write({**which, "seconds": round(seconds, 1), "facts": facts})
        print(f"{seconds:5.0f} s  {which}: {facts.get('reason') or facts.get('ms')}", flush=True)

    def _write(self, line: dict[str, Any]) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())


def read_lines(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What such a file says about the run and its trials; an incomplete last line is left out."""
    text = path.read_text()
    first, *others = text[: text.rfind("\n")].split("\n")
    return json.loads(first)["run"], [json.loads(line) for line in others]


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "kilolayer": kilolayer.__version__}
    for package in PEERS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def groups(trials: list[Trial], together: int) -> Iterator[list[Trial]]:
    """Adjacent trials that fit on the GPU together, at most `together`; a job marked alone is in its own group."""
    group: list[Trial] = []
    for trial in trials:
        full = sum(each.job.gigabytes for each in (*group, trial)) > MEMORY or len(group) == together
        if group and (full or trial.job.alone or group[-1].job.alone):
            yield group
            group = []
        group.append(trial)
    if group:
        yield group


def run_group(group: list[Trial], scratch: Path, end: float) -> Iterator[tuple[Worker, dict[str, Any]]]:
    """Start all, wait until all are ready, then let one after the other measure."""
    workers: list[Worker] = []
    try:
        workers += [Worker.start(trial, scratch) for trial in group]
        limit = min(time.monotonic() + READY_SECONDS, end)
        while not all(worker.ready for worker in workers) and time.monotonic() < limit:
            time.sleep(0.1)
        for worker in sorted(workers, key=lambda each: each.ready):  # those that are late end first
            yield worker, worker.measure(min(MEASURE_SECONDS, end - time.monotonic()))
    finally:
        for worker in workers:
            worker.stop()


def run(trials: Iterable[list[Trial]], end: float) -> Iterator[tuple[Trial, dict[str, Any], str]]:
    """All trials, group by group, with the result and output of each.

    One that ran out of memory alongside others is retried alone at the end.
    """
    queue = list(trials)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        while queue:
            group = queue.pop(0)
            if time.monotonic() > end:
                for trial in group:
                    yield trial, {"reason": "not started: the time was up"}, ""
                continue
            for worker, facts in run_group(group, Path(scratch), end):
                if "reason" in facts and len(group) > 1 and any(words in worker.log_text for words in NO_MEMORY):
                    queue.append([worker.trial])
                yield worker.trial, facts, worker.log_text
