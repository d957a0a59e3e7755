"""Trains the runs of a comparison, each in its own process, as many at once as the machine can hold.

A run's own folder shows what is left to do: it has scores, a checkpoint to resume from, or the lock of a process that is still
training, for example because an earlier queue was killed. Such a process is waited for, and no second one is started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kilolayer import hints
from kilolayer.compare.common_failure import CommonFailure
from kilolayer.compare.comparison import Comparison
from kilolayer.compare.failure import failure_of
from kilolayer.compare.machine import MPS, Demand, Device, cores, demand_of, devices_for, takes_turns, threads_of
from kilolayer.compare.result import Member, is_complete, record_of
from kilolayer.errors import InputError, KilolayerError
from kilolayer.files.paths import kind_of
from kilolayer.files.reading import read_text
from kilolayer.files.writing import make_folder
from kilolayer.runs.lock import holder_of, locked
from kilolayer.terminal import LiveLine, counted, say
from kilolayer.training.stop import Stop, Stopped, handle_signals

POLL_SECONDS = 0.2
# -P, as for the installed command: modules are not looked up in the current folder.
TRAIN = ("-P", "-m", "kilolayer", "train")
OUT_OF_MEMORY = ("out of memory", "killed")
IN_USE = "is in use by process"


@dataclass
class Child:
    """A run under way. process: None if an earlier queue started it; beside: whether other runs were under way meanwhile.

    logged: the length of its log in bytes when it was started.
    """

    member: Member
    device: Device
    process: subprocess.Popen[bytes] | None
    logged: int
    beside: bool = False

    def ended(self) -> bool:
        """Whether the process has ended."""
        return holder_of(self.member.folder) is None if self.process is None else self.process.poll() is not None

    def ask_to_stop(self) -> None:
        """Send the signal at which a run writes a checkpoint and ends."""
        with suppress(ProcessLookupError, PermissionError):
            if self.process is not None:
                self.process.terminate()
            elif (holder := holder_of(self.member.folder)) and _trains_in(holder, self.member.folder):
                os.kill(holder, signal.SIGTERM)


def run_all(
    comparison: Comparison,
    parallel: int | None = None,
    seconds: float | None = None,
    write_line: Callable[[str], Any] = say,
) -> int:
    """Train all runs that are not complete; return 0, or 128 + n if signal n ended it, after a checkpoint of each run.

    parallel: the maximum number of runs at once; None: as many as fit. seconds: after this time, the runs under way stop with a
    checkpoint and the waiting ones are left for later. A run that failed earlier is tried again. If the first few runs fail
    alike and no run has taken a step, no more are started, and this raises with their reason.
    """
    with locked(comparison.folder), handle_signals() as stop, stop.waiting_for_step():
        members = [member for member in comparison.members if not is_complete(member)]
        if not members:
            return 0
        if kind_of(comparison.started_in) != "folder":
            raise InputError(
                "the folder that the comparison was started in no longer exists, and its paths are relative to it",
                where=str(comparison.started_in),
                fix="create it again, or correct started_in in comparison.toml",
            )
        return _Queue(comparison, members, parallel, stop, write_line).run(seconds)


@dataclass
class _Queue:
    comparison: Comparison
    waiting: list[Member]
    parallel: int | None
    stop: Stop
    write_line: Callable[[str], Any]
    running: list[Child] = field(default_factory=list, init=False)
    alone: set[str] = field(default_factory=set, init=False)
    """Runs that ran out of memory beside others and are tried once more, alone."""
    failing: CommonFailure = field(default_factory=CommonFailure, init=False)
    shares: bool = field(default=False, init=False)
    """Whether a GPU has had several runs at once."""

    def __post_init__(self) -> None:
        plans: dict[tuple[object, ...], Any] = {}
        configs = {member.name: self.comparison.config_of(member) for member in self.waiting}
        self.demands: dict[str, Demand] = {name: demand_of(config, plans) for name, config in configs.items()}
        self.devices = devices_for({demand.kind for demand in self.demands.values()})
        self.waiting.sort(key=lambda member: -self.demands[member.name].flops)
        self.most = min(self.parallel or cores(), len(self.waiting))
        self.total = len(self.waiting)
        self.line = LiveLine()
        make_folder(self.comparison.folder / "logs")
        make_folder(self.comparison.folder / "runs")

    def run(self, seconds: float | None) -> int:
        end = None if seconds is None else time.monotonic() + seconds
        every = counted(len(self.comparison.members), "run")
        self.say(f"{self.total} of {every} to train, at most {self.most} at once")
        try:
            while self._is_active() and (end is None or time.monotonic() < end):
                if not self._start_next():
                    time.sleep(POLL_SECONDS)
                self._collect()
                self._show()
            if self._all_fail() and not self.running and not self.stop.signal:
                raise self._all_failed_error()
        finally:
            self._stop_all()
            self.line.clear()
        if self.stop.signal:
            return 128 + self.stop.signal
        return 0

    def _is_active(self) -> bool:
        return bool(self.running or (self.waiting and not self._all_fail())) and not self.stop.signal

    def say(self, text: str) -> None:
        self.line.clear()
        self.write_line(text)

    def _start_next(self) -> bool:
        """Start the next run that there is room for, or take over one that is already under way."""
        if not self.waiting or len(self.running) >= self.most or self._must_wait():
            return False
        for member in self.failing.in_order(self.waiting):
            demand = self.demands[member.name]
            room = [device for device in self.devices if device.holds(demand)]
            if not room or (member.name in self.alone and self.running):
                continue
            self.waiting.remove(member)
            self._start(member, min(room, key=lambda device: len(device.demands)))
            return True
        return False

    def _must_wait(self) -> bool:
        """Whether no run may be started now.

        The first run of all makes the vocabulary that the others find in the cache; a run may have to run alone; and if all
        runs fail so far, those under way may show that not all do.
        """
        if not self.running:
            return False
        if any(child.member.name in self.alone for child in self.running) or self._all_fail():
            return True
        return not any(kind_of(member.folder / "config.toml") for member in self.comparison.members)

    def _start(self, member: Member, device: Device) -> None:
        self.comparison.record_failure(member, None)
        log = self.comparison.log_path(member)
        logged = log.stat().st_size if kind_of(log) == "file" else 0
        process = None
        if holder_of(member.folder) is None:
            process = self._process(member, device)
            self.say(f"{member.name}: started" + (f" on GPU {name}" if (name := _gpu_of(device)) else ""))
        else:
            self.say(f"{member.name}: still running")
        if device.kind == "cuda" and device.demands and not self.shares:
            self.shares = True
            if takes_turns():
                self.say(f"runs that share a GPU take turns on it; once `{MPS} -d` is started, small ones run at the same time")
        device.demands[member.name] = self.demands[member.name]
        self.running.append(Child(member, device, process, logged))
        if len(self.running) > 1:
            for child in self.running:
                child.beside = True

    def _process(self, member: Member, device: Device) -> subprocess.Popen[bytes]:
        begun = kind_of(member.folder / "config.toml") is not None
        new = [str(self.comparison.config_path(member)), "--run", str(member.folder)]
        words = ["--resume", str(member.folder)] if begun else new
        command = [sys.executable, *TRAIN, *words]
        environment = {**os.environ, **threads_of(self.most), **device.environment}
        with open(self.comparison.log_path(member), "ab") as log:
            # In its own session: Ctrl-C at a terminal would otherwise reach it in addition to the signal sent from here.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.comparison.started_in,
                start_new_session=True,
            )

    def _collect(self) -> None:
        for child in [child for child in self.running if child.ended()]:
            code = None if child.process is None else child.process.returncode
            if code == 2 and holder_of(child.member.folder) is not None:
                child.process = None  # a process of an earlier queue holds the run: wait for that one
                continue
            self.running.remove(child)
            del child.device.demands[child.member.name]
            self._handle_exit(child, code)

    def _handle_exit(self, child: Child, code: int | None) -> None:
        if is_complete(child.member) or (code is not None and code > 128):
            self._report(child.member)
        elif code is None:
            self.waiting.append(child.member)  # the process of an earlier queue ended early: resume the run
        else:
            self._fail(child, code)

    def _report(self, member: Member) -> None:
        """Report the outcome of a run whose process has ended. One that died before it was stopped counts as dead."""
        outcome = self.comparison.result_of(member).outcome
        stopped = {"unfinished": f"stopped at {outcome.text}", "waiting": "stopped before it began"}
        self.say(f"{member.name}: {stopped.get(outcome.kind, outcome.text)}")

    def _fail(self, child: Child, code: int) -> None:
        member, log = child.member, self.comparison.log_path(child.member)
        text = failure_of(log, code, child.logged)
        if IN_USE in text:  # and the other process has ended in the meantime
            self.waiting.append(member)
            return
        if child.beside and text.startswith(OUT_OF_MEMORY) and member.name not in self.alone:
            self.alone.add(member.name)
            self.waiting.append(member)
            self.say(f"{member.name}: {text}; it will be run again on its own")
            return
        if code == 2 and not any(kind_of(each.folder / "config.toml") for each in self.comparison.members):
            raise _refusal(log, member)
        self.comparison.record_failure(member, text)
        self.say(f"{member.name}: failed: {text}; log: {log}")
        if not text.startswith(OUT_OF_MEMORY):  # running out of memory depends on the size: other runs may fit
            self.failing.learns = self.failing.learns or any(map(_has_stepped, self.comparison.members))
            self.failing.add(member, text)

    def _all_fail(self) -> bool:
        """Whether so many runs failed before their first step that all would; runs under way may still show otherwise."""
        if self.failing.is_reached:
            self.failing.learns = any(map(_has_stepped, self.comparison.members))
        return self.failing.is_reached

    def _all_failed_error(self) -> KilolayerError:
        failed, left = len(self.failing.members), len(self.waiting)
        others = f"; {counted(left, 'other')} {'is' if left == 1 else 'are'} not started" if left else ""
        return KilolayerError(
            f"{failed} runs failed in the same way before their first step: {self.failing.text}{others}",
            where=f"full log: {self.comparison.log_path(self.failing.members[-1])}",
            fix=f"fix the cause, then continue with: {hints.call('compare', self.comparison.folder)}",
        )

    def _show(self) -> None:
        if self.line.due:
            done = self.total - len(self.waiting) - len(self.running)
            names = ", ".join(child.member.name for child in self.running)
            self.line.show(f"{done} of {self.total} done, running: {names}")

    def _stop_all(self) -> None:
        """Stop the runs under way, with checkpoints; a second signal to this process is passed on to them too."""
        if not self.running:
            return
        self.say(f"stopping {len(self.running)} run{'s' * (len(self.running) > 1)}, each with a checkpoint")
        for child in self.running:
            child.ask_to_stop()
        while not all(child.ended() for child in self.running):
            try:
                time.sleep(POLL_SECONDS)
            except Stopped:
                for child in self.running:
                    child.ask_to_stop()
        for child in self.running:
            self._record_stopped(child)

    def _record_stopped(self, child: Child) -> None:
        code = None if child.process is None else child.process.returncode
        if code is not None and 0 < code <= 128 and not is_complete(child.member):
            text = failure_of(self.comparison.log_path(child.member), code, child.logged)
            self.comparison.record_failure(child.member, None if IN_USE in text else text)
        self._report(child.member)


def _has_stepped(member: Member) -> bool:
    """Whether a run has ever taken a step, according to its metrics."""
    record = record_of(member)
    return record is not None and bool(record.train)


def _gpu_of(device: Device) -> str:
    return device.environment.get("CUDA_VISIBLE_DEVICES", "")


def _trains_in(process: int, folder: Path) -> bool:
    """Whether a process is training in a folder; the process id in a lock may come from another machine."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return os.fsencode(folder) in words


def _refusal(log: Path, member: Member) -> InputError:
    """The error that the first run was refused with, which applies to all."""
    lines = read_text(log).splitlines()
    first = max((index for index, line in enumerate(lines) if line.startswith("kilolayer: ")), default=0)
    what, *rest = [line.strip().removeprefix("kilolayer: ") for line in lines[first:]] or ["the first run was refused"]
    where, fix = (rest[0], rest[1]) if len(rest) > 1 else ("", rest[0] if rest else "")
    return InputError(what, where=", ".join(filter(None, [where, f"in the run {member.name}"])), fix=fix)
