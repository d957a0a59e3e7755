"""Tables as pages and terminals show them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Cells as text: a name in the first column, numbers in the others."""

    header: list[str]
    rows: list[list[str]]
