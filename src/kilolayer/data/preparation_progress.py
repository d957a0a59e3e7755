"""The progress of a long preparation: a line that is rewritten on a terminal, and a line now and then elsewhere."""

from __future__ import annotations

import time

from kilolayer.terminal import LiveLine, counted, say, writes_to_terminal

SECONDS_BETWEEN_LINES = 60.0


class PreparationProgress:
    """Reports how many of about `total` pairs, or what `noun` says, have been read; `done` of them by an earlier process."""

    def __init__(self, name: str, total: int, done: int = 0, noun: str = "pair") -> None:
        self.name, self.total, self.noun, self._first = name, total, noun, done
        self._live = LiveLine()
        self._started = self._said = time.monotonic()
        if done and writes_to_terminal():
            say(f"{name}: continuing after {counted(done, noun)}, which an earlier process has prepared")

    def show(self, done: int) -> None:
        """Report that `done` pairs are prepared, unless the last report was just before."""
        now = time.monotonic()
        if not writes_to_terminal():
            return
        if self._live.due:
            self._live.show(self._line(done, now))
        elif not self._live.on_terminal and now - self._said >= SECONDS_BETWEEN_LINES:
            say(self._line(done, now))
            self._said = now

    def end(self) -> None:
        """Erase the line on a terminal."""
        self._live.clear()

    def _line(self, done: int, now: float) -> str:
        rate = (done - self._first) / max(now - self._started, 1e-9)
        if done > self.total:  # the files are compressed
            return f"preparing {self.name}: {counted(done, self.noun)}, {rate:,.0f} a second"
        left = (self.total - done) / max(rate, 1e-9)
        whole = counted(self.total, self.noun)
        return f"preparing {self.name}: {done / self.total:.0%} of {whole}, {rate:,.0f} a second, {_duration(left)} left"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 90 else f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"
