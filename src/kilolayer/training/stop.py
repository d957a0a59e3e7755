"""Handles the signals that end a run: SIGTERM, SIGINT and SIGHUP. The first one asks, a second one insists."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

from kilolayer import hints
from kilolayer.parallel.parent import when_parent_dies
from kilolayer.terminal import say, under_torchrun, writes_to_terminal

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STEP_SECONDS = 20.0
"""How long a step may continue after a signal. Schedulers commonly kill 30 seconds later, and saving also takes time."""
ORPHAN_SECONDS = 60.0
"""How long a process may take to end after its parent has died, before it is killed."""
REPEAT_SECONDS = 5.0
"""When to raise again after a raised signal had no effect, since some code swallows exceptions."""
DROPPED_SECONDS = 0.05
"""The same if Python reports that the exception was swallowed, as in a destructor."""


class Stopped(KeyboardInterrupt):
    """A signal has ended the work. number: the first signal that arrived; then: how to continue."""

    def __init__(self, number: int, then: str = "") -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}{f'; {then}' if then else ''}")
        self.number = number


@dataclass
class Stop:
    """Whether a signal has arrived, and what it does: it raises `Stopped` in the main thread, unless the work waits for a step.

    signal: the first one that arrived, 0 if there was none; times: how many arrived. A second one always raises.
    """

    signal: int = 0
    times: int = 0
    _waits: bool = field(default=False, init=False)
    _raised: bool = field(default=False, init=False)
    _may_abandon: Callable[[], bool] | None = field(default=None, init=False)

    @property
    def is_repeated(self) -> bool:
        """Whether a second signal has arrived."""
        return self.times > 1

    @contextmanager
    def waiting_for_step(self) -> Iterator[None]:
        """Inside, a signal is only recorded: the work checks `signal` between its steps."""
        with self._waiting(True):
            yield

    @contextmanager
    def raising_at_once(self) -> Iterator[None]:
        """Inside, a signal raises at once; one that arrived earlier raises on entry."""
        with self._waiting(False):
            if self.signal:
                raise Stopped(self.signal)
            with self._reraise_stopped():
                yield

    @contextmanager
    def raising_after_grace_period(self, may_abandon: Callable[[], bool]) -> Iterator[None]:
        """Inside, a signal lets the step continue for STEP_SECONDS and then raises as soon as `may_abandon` returns True."""
        self._may_abandon = may_abandon
        try:
            if self.signal:
                _raise_in(STEP_SECONDS)
            with self._reraise_stopped():
                yield
        finally:
            self._may_abandon = None

    def on_parent_death(self) -> None:
        """The parent process has died: end as if a signal had arrived, or at once if that takes more than ORPHAN_SECONDS."""
        if not self.signal:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_SECONDS)
        os._exit(128 + signal.SIGTERM)

    def acknowledge(self) -> None:
        """The exception has taken effect: do not raise it again."""
        self._raised = False
        _raise_in(0)

    def handle(self, number: int, _: FrameType | None) -> None:
        """The signal handler."""
        if number == signal.SIGALRM:
            self._repeat()
            return
        self.times += 1
        self.signal = self.signal or number
        if self.is_repeated or not self._waits:
            self._raise()
        if self._may_abandon is not None:
            _raise_in(STEP_SECONDS)

    def _repeat(self) -> None:
        if self.is_repeated or not self._waits or (self._may_abandon is not None and self._may_abandon()):
            self._raise()
        if self._may_abandon is not None:
            _raise_in(1.0)

    def _raise(self) -> NoReturn:
        self._raised = True
        _raise_in(REPEAT_SECONDS)
        raise Stopped(self.signal)

    @contextmanager
    def _reraise_stopped(self) -> Iterator[None]:
        """Compiled libraries may replace an exception raised while they run by their own: raise `Stopped` again instead."""
        try:
            yield
        except Exception as error:
            if not self._raised:
                raise
            raise Stopped(self.signal) from error

    @contextmanager
    def _waiting(self, waits: bool) -> Iterator[None]:
        before, self._waits = self._waits, waits
        try:
            yield
        finally:
            self._waits = before


@contextmanager
def handle_signals() -> Iterator[Stop]:
    """Install the signal handlers; only possible in the main thread, elsewhere nothing is handled."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    # If SIGHUP is ignored, as under nohup, the run is meant to outlive its terminal.
    ours = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop.handle) for number in (*ours, signal.SIGALRM)}
    report = sys.unraisablehook

    def repeat_or_report(dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, Stopped):
            _raise_in(DROPPED_SECONDS)
        else:
            report(dropped)

    sys.unraisablehook = repeat_or_report
    try:
        yield stop
    finally:
        stop.acknowledge()
        sys.unraisablehook = report
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def stoppable_run(folder: Path) -> Iterator[Stop]:
    """Handle signals while the run in `folder` is trained; one that ends it raises `Stopped`, which says how to continue."""
    with handle_signals() as stop:
        if under_torchrun():
            when_parent_dies(os.getppid(), stop.on_parent_death)
        try:
            with stop.raising_at_once():
                yield stop
        except Stopped as ended:
            stop.acknowledge()
            then = resume_hint(folder)
            if writes_to_terminal():
                say(f"stopped by a signal; {then}")
            raise Stopped(ended.number, then) from None


def resume_hint(folder: Path) -> str:
    """How to continue the run in a folder that a signal has ended."""
    if (folder / "config.toml").exists():
        return f"continue with: {hints.call('train', resume=folder)}"
    return f"there is nothing to resume yet: the same {'command' if hints.in_shell() else 'call'} starts again"


def _raise_in(seconds: float) -> None:
    """Set the process's one alarm timer; 0 clears it."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
