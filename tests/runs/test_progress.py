"""The live line, on a made terminal under a made clock."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kilolayer import terminal as stderr
from kilolayer.runs import progress
from kilolayer.runs.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """What a reader sees: a carriage return goes back to the start of the line, and later letters cover earlier ones."""
        lines = []
        for written in self.getvalue().split("\n"):
            line = ""
            for part in written.split("\r"):
                line = part + line[len(part) :]
            lines.append(line.rstrip())
        return lines


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (progress, stderr):
        monkeypatch.setattr(module, "time", made)
    return made


def counted(calls: list[int], step: int) -> Callable[[], dict[str, str]]:
    return lambda: calls.append(step) or {"loss": f"{step}.0"}


def test_the_live_line_is_a_second_old_at_most_and_the_values_are_asked_for_then_alone(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    shown, calls = Progress(tmp_path / "log.txt", 100, 0), list[int]()
    for step in range(1, 31):
        clock.now += 0.125
        shown.refresh(step, counted(calls, step))
    assert calls == [8, 16, 24]
    assert terminal.screen() == ["step 24/100  loss 24.0  0:00:10 left"]  # 76 steps of an eighth: 9.5
    assert not (tmp_path / "log.txt").exists()


def test_a_line_that_stays_replaces_the_live_one(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    shown = Progress(tmp_path / "log.txt", 100, 0)
    clock.now += 5
    shown.refresh(50, lambda: {"loss": "a long value that must not be left behind"})
    shown.say("kept")
    shown.update(60, {"loss": "3"}, logged=True)
    shown.close()
    assert terminal.screen() == ["kept", "step 60/100  loss 3  0:00:03 left", ""]
    assert (tmp_path / "log.txt").read_text() == "kept\nstep 60/100  loss 3  0:00:03 left\n"


def test_the_live_line_never_wraps(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    shown = Progress(tmp_path / "log.txt", 100, 0)
    shown.update(1, {"loss": "3" * 200}, logged=True)
    assert len(terminal.screen()[0]) < 80
    assert "3" * 200 in (tmp_path / "log.txt").read_text()


def test_nothing_is_refreshed_where_there_is_no_terminal(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, calls = io.StringIO(), list[int]()
    monkeypatch.setattr(sys, "stderr", pipe)
    shown = Progress(tmp_path / "log.txt", 100, 0)
    clock.now += 10
    shown.refresh(1, counted(calls, 1))
    assert (calls, pipe.getvalue()) == ([], "")
    shown.update(2, {"loss": "3"}, logged=True)
    assert pipe.getvalue() == "step 2/100  loss 3  0:08:10 left\n"
