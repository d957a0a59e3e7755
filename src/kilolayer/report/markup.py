"""HTML of small things. Text goes in as it is and comes out escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape


def section(title: str, body: str) -> str:
    """A titled part of the page around ready HTML; nothing where the body is empty."""
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>" if body else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column names the rows and whose others are numbers."""
    head = f'<th scope="col">{escape(header[0])}</th>' + "".join(
        f'<th scope="col" class="number">{escape(title)}</th>' for title in header[1:]
    )
    body = [
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f'<td class="number">{escape(cell)}</td>' for cell in row[1:])
        + "</tr>"
        for row in rows
    ]
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(body)}</table></div>'


def folded(summary: str, body: str) -> str:
    """Ready HTML that shows when its summary is clicked."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def folded_if_long(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of directions; of many, one that shows when it is clicked."""
    body = table(header, rows)
    return body if len(rows) <= 12 else folded(f"{len(rows)} directions", body)


def bullets(items: Sequence[str]) -> str:
    """A list; nothing where there are no items."""
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>" if items else ""


def pre(text: str) -> str:
    """Text with its own line breaks; nothing where it is blank."""
    return f"<pre>{escape(text.strip())}</pre>" if text.strip() else ""


def rest(count: int, where: str) -> str:
    """How many more there are, and where to find them."""
    return f"<p>{count:,} more {escape(where)}.</p>" if count > 0 else ""


def show_number(value: float) -> str:
    """All digits of a whole number, four of another, or a dash where there is no number."""
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if value == round(value) else f"{value:,.4g}"


def show_count(value: float) -> str:
    """12345678 as 12.3 M."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def show_duration(seconds: float) -> str:
    """Seconds in the unit that a person would choose."""
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} seconds"
