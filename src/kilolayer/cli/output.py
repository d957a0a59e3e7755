"""How results reach a person: tables on a terminal, plain lines elsewhere, JSON on request. Results go to stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any


def show_table(title: str, rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> None:
    """A titled table; the first column is left-aligned, the others right-aligned."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left", show_header=bool(header), box=None, pad_edge=False)
        for index in range(max(map(len, [header, *rows]))):
            table.add_column(header[index] if header else "", justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*row)
        Console(highlight=False).print(table, "")
        return
    lines = [list(map(str, row)) for row in ([header] if header else []) + list(rows)]
    widths = [max(len(line[index]) for line in lines if index < len(line)) for index in range(max(map(len, lines)))]
    print(title)
    for line in lines:
        cells = [cell.ljust(widths[0]) if index == 0 else cell.rjust(widths[index]) for index, cell in enumerate(line)]
        print("  " + "  ".join(cells).rstrip())
    print()


def show_scores(tests: dict[str, dict[str, Any]]) -> None:
    """The scores of each test part, as scores.json holds them, with their signatures; what could not be had, with why."""
    for name, entry in tests.items():
        rows = [(each["name"], f"{each['value']:.2f}", each["signature"]) for each in entry.values() if "value" in each]
        show_table(name, rows)
        for each in entry.values():
            if "reason" in each:
                print(f"{each['name']}: {each['reason']}")


def show_json(result: Any) -> None:
    """One JSON document."""
    print(json.dumps(result, indent=2))


def human_count(number: float) -> str:
    """12345678 as 12.3 M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def human_bytes(number: float) -> str:
    """12345678 as 11.8 MiB."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number:.0f} B"
