"""kilolayer translate: translate lines, in order."""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kilolayer.cli.configuration import add_device, add_precision
from kilolayer.cli.output import write_text
from kilolayer.cli.search_flags import SAMPLING, add_search_flags, typed_search
from kilolayer.terminal import LiveLine, counted, say

if TYPE_CHECKING:
    from kilolayer.generate.translate import Translation

LIMITS = ("max_length_factor", "max_length_extra", "max_source_length", "batch_tokens", "window")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.set_defaults(reads_lines=True)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--direction", metavar="SOURCE-TARGET", help="direction, if the run has several")
    add_device(parser)
    add_precision(parser)
    add_search_flags(parser, ("beam", "length_penalty", *SAMPLING, "n_best", *LIMITS))


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Translate standard input."""
    from kilolayer.runs.run import Run
    from kilolayer.tasks.translation.translator import Translator

    translator = Translator(Run.open(options.run, ["translation"]), device=options.device, precision=options.precision)
    method = {"method": "greedy"} if options.greedy else {}
    search = typed_search(options, typed, translator.search, **method)
    source = Input(sys.stdin.buffer)
    answers = translator.translations(source.lines(), search, direction=options.direction)
    try:
        cut = _print_answers(answers, source, options.n_best is not None)
    finally:
        source.live.clear()
    if cut:
        say(f"{counted(cut, 'line')} longer than --max-source-length tokens: truncated")
    if source.undecoded:
        say(f"{counted(source.undecoded, 'line')} with bytes that are not valid UTF-8: these were read as U+FFFD")
    return 0


def _print_answers(answers: Iterator[Translation], source: Input, n_best: bool) -> int:
    """Print each translation as it is finished; return how many lines were cut."""
    cut = 0
    for number, answer in enumerate(answers, 1):
        source.answered()
        cut += answer.cut
        if n_best:
            for score, text in zip(answer.scores, answer.texts, strict=True):
                write_text(f"{number}\t{score:.4f}\t{text}\n")
        else:
            write_text(f"{answer.text}\n")
        if number % 100 == 0:
            sys.stdout.flush()
    return cut


class Input:
    """Lines to translate and, on a terminal, the progress: lines done, speed and, for a file, the remaining time."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream
        self.size = _bytes_ahead(stream)
        self.live = LiveLine()
        self.start = time.monotonic()
        self.waiting: deque[int] = deque()
        """The length in bytes of each line that is read but not yet translated; a search reads a window of lines ahead."""
        self.lines_done = self.bytes_done = self.undecoded = 0

    def lines(self) -> Iterator[str]:
        """Yield the lines, split only at line feeds; bytes that are not UTF-8 become U+FFFD, and their lines are counted."""
        from kilolayer.data.text import BOM, byte_lines

        for number, line in enumerate(byte_lines(self.stream, "standard input"), 1):
            if self.live.due:
                self.live.show(self.state())
            self.waiting.append(len(line))
            line = line.removeprefix(BOM) if number == 1 else line
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError:
                self.undecoded += 1
                yield line.decode("utf-8", errors="replace")

    def answered(self) -> None:
        """Count the oldest waiting line as done; its translation is about to be printed."""
        self.lines_done += 1
        self.bytes_done += self.waiting.popleft()
        if sys.stdout.isatty():
            self.live.clear()

    def state(self) -> str:
        """The progress, as text."""
        seconds = time.monotonic() - self.start
        text = f"{counted(self.lines_done, 'line')}, {self.lines_done / seconds:,.1f} lines/s"
        if not self.size or not self.bytes_done:
            return text
        share = min(self.bytes_done / self.size, 1.0)
        return f"{text}, {share:.0%} done, {timedelta(seconds=round(seconds / share - seconds))} left"


def _bytes_ahead(stream: BinaryIO) -> int:
    """The bytes from here to the end of a file; 0 if there is no known end, as in a pipe."""
    if not stream.seekable():
        return 0
    here = stream.tell()
    end = stream.seek(0, io.SEEK_END)
    stream.seek(here)
    return end - here
