"""Why the process of a run has failed, in one line, from its exit code and its output."""

from __future__ import annotations

import re
from pathlib import Path

from kilolayer.files.paths import kind_of
from kilolayer.files.reading import read_bytes

TRACEBACK = "Traceback (most recent call last):"
UNRAISED = "Exception ignored"
"""Python's prefix for errors after which the program continued, for example while shutting down."""
FRAME = re.compile(r'\s+File ".*?([^/\\"]+)", line (\d+)')
NAMES_ALONE = re.compile(r"([\w.]+: )*[\w.]*(Error|Exception|Exit|Interrupt|Iteration):?")
LONGEST = 300


def failure_of(log: Path, code: int, start: int = 0) -> str:
    """The line that names the error. start: the length in bytes of what earlier processes wrote to the log."""
    written = read_bytes(log)[start:] if kind_of(log) == "file" else b""
    lines = [line for line in written.decode("utf-8", errors="replace").splitlines() if line.strip()]
    messages = [line.removeprefix("kilolayer: ").strip() for line in lines if line.startswith("kilolayer: ")]
    if code < 0:
        return "killed, probably because memory ran out" if code == -9 else f"ended by signal {-code}"
    if code == 2 and messages:
        return "out of memory" if messages[-1] == "there is not enough memory" else messages[-1]
    found = _exception(lines) or (lines[-1].strip() if lines else f"exit code {code}")
    return found if len(found) <= LONGEST else f"{found[:LONGEST]}..."


def _exception(lines: list[str]) -> str | None:
    """The line of the exception: the first line that is not indented after the last traceback.

    An exception without a message is given with its location; one that only announces another, such as a compiler's "raised:",
    with the line after it.
    """
    starts = [
        index
        for index, line in enumerate(lines)
        if line.endswith(TRACEBACK) and not (index and lines[index - 1].startswith(UNRAISED))
    ]
    if not starts:
        return None
    frames: list[str] = []
    below = iter(lines[starts[-1] + 1 :])
    for line in below:
        if not line[0].isspace():
            message = line.strip()
            if NAMES_ALONE.fullmatch(message):
                return f"{message.rstrip(':')} ({frames[-1]})" if frames else message
            return f"{message} {next(below, '').strip()}".strip() if message.endswith(":") else message
        if frame := FRAME.match(line):
            frames.append(f"{frame[1]}, line {frame[2]}")
    return None
