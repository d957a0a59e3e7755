"""Tables for pages and terminals."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table of text cells: names in the first column, numbers in the others."""

    header: list[str]
    rows: list[list[str]]
