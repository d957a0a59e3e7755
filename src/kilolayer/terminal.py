"""Writes to the terminal.

Text from elsewhere (sentences, names of files and runs) is shown but cannot control the terminal, and work continues even if
nobody reads the output.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from pathlib import Path

REFRESH_SECONDS = 1.0
# Control characters (which start escape sequences), those that change the direction of text, and lone surrogates.
UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with each control character escaped, as \\x1b; line feeds and tabs are kept."""
    return UNSHOWN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def human_bytes(number: float) -> str:
    """Format a number of bytes: 12345678 as 11.8 MiB."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number:.0f} B"


def counted(number: int, noun: str) -> str:
    """A count with its noun: 1 line, 2,000 lines, 3 batches."""
    return f"{number:,} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """The plural of a noun: lines, batches."""
    return f"{noun}es" if noun.endswith(("s", "sh", "ch", "x")) else f"{noun}s"


def command() -> str:
    """How to type this command again in the same shell: its name if the shell finds it, else the way it was started."""
    from shutil import which  # not needed to show the help

    started = Path(sys.argv[0])
    if started.name == "__main__.py" and started.parent.name == "kilolayer":
        return f"{Path(sys.executable).name} -m kilolayer"
    if started.name != "kilolayer" or which("kilolayer") is not None:
        return "kilolayer"
    return str(started)


def activation_hint() -> str | None:
    """How to put the command on the shell's path, if it was started from an environment that is not active."""
    activate = Path(sys.argv[0]).parent / "activate"
    if "/" not in command() or not activate.exists():
        return None
    return f"`source {activate}` once in a shell, and the command there is kilolayer"


def say(text: str) -> None:
    """Write a line to stderr."""
    _write(f"{printable(text)}\n")


def writes_to_terminal() -> bool:
    """Whether this process writes to the terminal: of several that torchrun started, only the first does."""
    return not under_torchrun() or os.environ.get("RANK", "0") == "0"


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _write(text: str) -> None:
    """Write to stderr; once it is closed, full, or its reader has gone, nothing more is written."""
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison]  as Python starts with it closed
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except UnicodeEncodeError:
        _write(text.encode("ascii", "backslashreplace").decode())
    except (OSError, ValueError):
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  stays open: warnings and the end of the process write to it


def abandon_stdout() -> None:
    """Stop writing to standard output, which is no longer writable, even when the process exits."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


class LiveLine:
    """The last line of a terminal, rewritten as work proceeds; does nothing if stderr is not a terminal."""

    def __init__(self) -> None:
        self.on_terminal = sys.stderr is not None and sys.stderr.isatty()  # pyright: ignore[reportUnnecessaryComparison]
        self._written = time.monotonic()
        self._width = 0

    @property
    def due(self) -> bool:
        """Whether it is time to update the line."""
        return self.on_terminal and time.monotonic() - self._written >= REFRESH_SECONDS

    def show(self, text: str) -> None:
        """Replace the line by `text`, cut to the terminal's width, because a line that wraps cannot be rewritten."""
        if self.on_terminal:
            shown = printable(text)[: _columns() - 1]
            _write("\r" + shown.ljust(self._width))
            self._written, self._width = time.monotonic(), len(shown)

    def clear(self) -> None:
        """Erase the line."""
        if self._width:
            _write("\r" + " " * self._width + "\r")
            self._width = 0

    def end(self) -> None:
        """Keep the line as it is, and start another."""
        if self._width:
            _write("\n")
            self._width = 0


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


class Lines(logging.Handler):
    """A log handler that shows each record of the library as a line."""

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record."""
        say(record.getMessage())


def prepare() -> None:
    """Make the process's standard streams safe to write to; called once, by the command."""
    for descriptor, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            # Otherwise the next file opened would become standard output, and warnings would be written into it.
            os.open(os.devnull, mode)
    if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    logging.getLogger("kilolayer").addHandler(Lines())
    logging.getLogger("kilolayer").propagate = False
