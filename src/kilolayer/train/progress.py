"""How a run shows itself: a live line on a terminal, plain lines elsewhere. Logs go to stderr and to the run's log.txt."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path


class Progress:
    """Steps, loss, speed and the time that is left."""

    def __init__(self, log: Path, steps: int, step: int) -> None:
        self.log, self.steps, self.first = log, steps, step
        self.start = time.monotonic()
        self.live = sys.stderr.isatty()
        self.width = 0

    def say(self, text: str) -> None:
        """A line that stays, in the terminal and in log.txt."""
        self._clear()
        print(text, file=sys.stderr, flush=True)
        with self.log.open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    def update(self, step: int, values: Mapping[str, str], *, logged: bool) -> None:
        """The state of the run: a live line on a terminal; elsewhere, and in log.txt, a line where `logged`."""
        done = step - self.first
        left = (time.monotonic() - self.start) / done * (self.steps - step) if done else 0.0
        shown = "  ".join(f"{name} {value}" for name, value in values.items())
        line = f"step {step}/{self.steps}  {shown}  {timedelta(seconds=round(left))} left"
        if logged:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        if self.live:
            self._clear()
            print(line, end="", file=sys.stderr, flush=True)
            self.width = len(line)
        elif logged:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the live line."""
        if self.width:
            print(file=sys.stderr, flush=True)
            self.width = 0

    def _clear(self) -> None:
        if self.width:
            print("\r" + " " * self.width + "\r", end="", file=sys.stderr)
            self.width = 0
