"""How far `kilolayer translate` is, on a terminal."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest

from kilolayer.cli.main import main
from kilolayer.tasks.translation.translate import Input


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Pipe(io.BytesIO):
    def seekable(self) -> bool:
        return False


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock's time, the last of the list."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[-1])
    return now


@pytest.mark.parametrize(
    ("stream", "state"),
    [
        (io.BytesIO(b"one\ntwo\nthree is long\n"), "2 lines, 0.2 lines/s, 36% done, 0:00:18 left"),
        (Pipe(b"one\ntwo\nthree is long\n"), "2 lines, 0.2 lines/s"),
    ],
)
def test_lines_that_are_read_ahead_do_not_count_as_done(seconds: list[float], stream: io.BytesIO, state: str) -> None:
    source = Input(stream)
    assert list(source.lines()) == ["one", "two", "three is long"]
    source.answered()
    source.answered()
    seconds.append(10.0)
    assert source.state() == state


def test_a_byte_order_mark_is_no_part_of_the_first_line() -> None:
    assert list(Input(io.BytesIO(b"\xef\xbb\xbfone\r\n\xef\xbb\xbftwo\n")).lines()) == ["one", "\ufefftwo"]


def test_only_what_is_ahead_counts(seconds: list[float]) -> None:
    stream = io.BytesIO(b"a heading of another reader\none\ntwo\n")
    stream.readline()
    source = Input(stream)
    assert list(source.lines()) == ["one", "two"]
    source.answered()
    seconds.append(1.0)
    assert source.state().endswith("50% done, 0:00:01 left")


def test_a_terminal_sees_progress_and_the_output_stays_as_it_is(
    trained: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, outputs = [], []
    for stderr in (io.StringIO(), Terminal()):
        data = "".join(f"The dog sees {number} cats.\n" for number in range(9)).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        monkeypatch.setattr(sys, "stderr", stderr)
        monkeypatch.setattr("kilolayer.terminal.REFRESH_SECONDS", 0.0)
        assert main(["translate", str(trained[0]), "--window", "3"]) == 0
        shown.append(stderr.getvalue())
        outputs.append(sys.stdout.getvalue())  # pyright: ignore
    assert shown[0] == ""
    assert outputs[0] == outputs[1]
    assert outputs[0].count("\n") == 9
    states = [part.split(",")[0] for part in shown[1].split("\r") if "lines/s" in part]
    assert states == [f"{done} lines" for done in (0, 0, 0, 3, 3, 3, 6, 6, 6)]
    assert "67% done" in shown[1]
    assert shown[1].endswith(" \r")  # and leaves no trace
