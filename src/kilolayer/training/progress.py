"""How a run shows itself: a live line on a terminal, plain lines elsewhere. Logs go to stderr and to the run's log.txt."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

REFRESH_SECONDS = 1.0


class LiveLine:
    """The last line of a terminal, written over as work goes on; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        self.on_terminal = sys.stderr.isatty()
        self._written = time.monotonic()
        self._width = 0

    @property
    def due(self) -> bool:
        """Whether it is time to show something new."""
        return self.on_terminal and time.monotonic() - self._written >= REFRESH_SECONDS

    def show(self, text: str) -> None:
        """Put `text` in the place of what is there, cut to the terminal's width: a line that wraps cannot be written over."""
        if self.on_terminal:
            shown = text[: _columns() - 1]
            print("\r" + shown.ljust(self._width), end="", file=sys.stderr, flush=True)
            self._written, self._width = time.monotonic(), len(shown)

    def clear(self) -> None:
        """Leave the line empty."""
        if self._width:
            print("\r" + " " * self._width + "\r", end="", file=sys.stderr, flush=True)
            self._width = 0

    def end(self) -> None:
        """Leave the line as it is, and begin another."""
        if self._width:
            print(file=sys.stderr, flush=True)
            self._width = 0


class Progress:
    """Steps, loss, speed and the time that is left."""

    def __init__(self, log: Path, steps: int, step: int) -> None:
        self.log, self.steps, self.first = log, steps, step
        self.start = time.monotonic()
        self.live = LiveLine()

    def say(self, text: str) -> None:
        """A line that stays, in the terminal and in log.txt."""
        self.live.clear()
        print(text, file=sys.stderr, flush=True)
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
                print(line, file=sys.stderr, flush=True)

    def refresh(self, step: int, values: Callable[[], Mapping[str, str]]) -> None:
        """To be called after every step: a live line that is a second old is written anew, with the values of now."""
        if self.live.due:
            self.update(step, values(), logged=False)

    def close(self) -> None:
        """End the live line."""
        self.live.end()

    def _write(self, line: str) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


class Silence(Progress):
    """What a process shows that is not the first of a run: nothing."""

    def say(self, text: str) -> None:
        """Leave it to the first."""

    def update(self, step: int, values: Mapping[str, str], *, logged: bool) -> None:
        """Leave it to the first."""


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
