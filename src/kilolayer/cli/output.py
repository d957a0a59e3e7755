"""Prints results to stdout: tables on a terminal, plain lines elsewhere, JSON on request."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from kilolayer.display import Line, Part, TitledTable
from kilolayer.tasks.registry import Headline
from kilolayer.tasks.results import tables_of_tests
from kilolayer.terminal import printable, say


def show_line(text: str = "") -> None:
    """Print a line of results."""
    show_parts([Line(text)])


def write_text(text: str) -> None:
    """Print a model's output: unchanged, in UTF-8 whatever the locale; on a terminal, with control characters escaped."""
    if sys.stdout.isatty():
        sys.stdout.write(printable(text))
        return
    if (sys.stdout.encoding or "utf8").lower().replace("-", "") != "utf8":  # an in-memory stream has no encoding
        sys.stdout.reconfigure(encoding="utf-8")  # pyright: ignore[reportAttributeAccessIssue]
    sys.stdout.write(text)


def show_table(title: str, rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> None:
    """Print a titled table; the first column is left-aligned, the others right-aligned."""
    show_parts([TitledTable(title, rows, header)])


def show_parts(parts: Iterable[Part]) -> None:
    """Print the lines and tables of a result, tables on a terminal cut to its width."""
    for part in parts:
        if isinstance(part, TitledTable) and sys.stdout.isatty():
            _show_on_terminal(part)
        else:
            for line in part.lines():
                print(line)


def _show_on_terminal(given: TitledTable) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    header, title = given.header, Text(printable(given.title))
    table = Table(title=title, title_justify="left", show_header=bool(header), box=None, pad_edge=False)
    for index in range(max(map(len, [header, *given.rows]))):
        table.add_column(Text(printable(header[index])) if header else "", justify="left" if index == 0 else "right")
    for row in given.rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console(highlight=False).print(table, "")


def show_scores(scores: dict[str, Any], headline: Headline | None = None) -> None:
    """Print the scores of each test set, with their signatures, and why a score is unavailable.

    scores: as in scores.json. headline: the task's main score, which may have more decimals.
    """
    from kilolayer.report.run_parts import score_parts

    show_parts(score_parts(scores, headline))
    if not tables_of_tests(scores):
        say("there are no scores: the run has no test set")


def show_scores_json(scores: dict[str, Any]) -> None:
    """Print the scores of all test sets, and which weights they belong to, as one JSON document."""
    show_json({"scores": tables_of_tests(scores), **{name: scores[name] for name in ("weights",) if name in scores}})


def show_json(result: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(result, indent=2))


def human_count(number: float) -> str:
    """Format a number: 12345678 as 12.3 M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"
