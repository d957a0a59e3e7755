"""How a run shows itself: a live line on a terminal, plain lines elsewhere. Logs go to stderr and to the run's log.txt."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

from kilolayer.files.writing import append
from kilolayer.terminal import LiveLine, printable, say


class Progress:
    """Steps, loss, speed and the time that is left."""

    def __init__(self, log: Path, steps: int, step: int) -> None:
        self.log, self.steps, self.first = log, steps, step
        self.start = time.monotonic()
        self.live = LiveLine()

    def say(self, text: str) -> None:
        """A line that stays, in the terminal and in log.txt."""
        self.live.clear()
        say(text)
        self._write(text)

    def update(self, step: int, values: Mapping[str, str], *, logged: bool) -> None:
        """The state of the run: a live line on a terminal; elsewhere, and in log.txt, a line where `logged`."""
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
        """To be called after every step: a live line that is a second old is written anew, with the values of now."""
        if self.live.due:
            self.update(step, values(), logged=False)

    def close(self) -> None:
        """End the live line."""
        self.live.end()

    def _write(self, line: str) -> None:
        append(self.log, f"{printable(line)}\n")


class Silence(Progress):
    """What a process shows that is not the first of a run: nothing."""

    def say(self, text: str) -> None:
        """Leave it to the first."""

    def update(self, step: int, values: Mapping[str, str], *, logged: bool) -> None:
        """Leave it to the first."""
