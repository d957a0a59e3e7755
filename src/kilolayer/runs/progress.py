"""Shows the progress of a run: a live line on a terminal, plain lines elsewhere, on stderr and in the run's log.txt."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

from kilolayer.files.writing import append
from kilolayer.terminal import LiveLine, printable, say


class Progress:
    """Shows steps, loss, speed and the remaining time."""

    def __init__(self, log: Path, steps: int, step: int) -> None:
        self.log, self.steps, self.first = log, steps, step
        self.start = time.monotonic()
        self.live = LiveLine()

    def say(self, text: str) -> None:
        """Write a permanent line to the terminal and to log.txt."""
        self.live.clear()
        say(text)
        self._write(text)

    def update(self, step: int, values: Mapping[str, str], *, logged: bool) -> None:
        """Show the state of the run: a live line on a terminal; elsewhere, and in log.txt, a line if `logged`."""
        done = step - self.first
        left = (time.monotonic() - self.start) / done * (self.steps - step) if done else 0.0
        shown = "  ".join(f"{name} {value}" for name, value in values.items())
        line = f"step {step}/{self.steps}  {shown}  {timedelta(seconds=round(left))} left"
        self.live.show(line)
        if logged:
            self._write(line)
            if not self.live.on_terminal:
                say(line)

    def refresh(self, step: int, values: Callable[[], Mapping[str, str]]) -> None:
        """Call it after every step: rewrites the live line, with current values, if it is a second old."""
        if self.live.due:
            self.update(step, values(), logged=False)

    def close(self) -> None:
        """End the live line."""
        self.live.end()

    def _write(self, line: str) -> None:
        append(self.log, f"{printable(line)}\n")


class NullProgress(Progress):
    """The progress of every process but the first: it shows nothing."""

    def say(self, text: str) -> None:
        """Do nothing: the first process says it."""

    def update(self, step: int, values: Mapping[str, str], *, logged: bool) -> None:
        """Do nothing: the first process shows it."""
