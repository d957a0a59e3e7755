"""Results that print in Python as their command prints them, and show as HTML in a notebook."""

from __future__ import annotations

import base64
import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import ClassVar, Protocol

from kilolayer.terminal import printable


@dataclass(frozen=True)
class Line:
    """A line of text, or several."""

    text: str = ""

    def lines(self) -> list[str]:
        """The text as printed."""
        return [printable(self.text)]

    def html(self) -> str:
        """A paragraph; nothing for a blank line."""
        return f'<p style="white-space: pre-wrap; margin: .2em 0">{_escaped(self.text)}</p>' if self.text.strip() else ""


@dataclass(frozen=True)
class TitledTable:
    """A table of text cells: the first column is left-aligned, the others are right-aligned."""

    title: str
    rows: Sequence[Sequence[str]]
    header: Sequence[str] = ()

    def lines(self) -> list[str]:
        """The lines as printed where there is no terminal; a blank one follows."""
        rows = [list(map(printable, row)) for row in ([self.header] if self.header else []) + list(self.rows)]
        widths = [max(len(row[index]) for row in rows if index < len(row)) for index in range(max(map(len, rows), default=0))]
        cells = [
            [cell.ljust(widths[0]) if index == 0 else cell.rjust(widths[index]) for index, cell in enumerate(row)]
            for row in rows
        ]
        return [printable(self.title), *("  " + "  ".join(row).rstrip() for row in cells), ""]

    def html(self) -> str:
        """A table with its title as caption."""
        caption = f'<caption style="caption-side: top; text-align: left"><b>{_escaped(self.title)}</b></caption>'
        head = f"<thead>{_row(self.header, 'th')}</thead>" if self.header else ""
        body = "".join(_row(row, "td") for row in self.rows)
        return f'<table style="margin: .6em 0">{caption}{head}<tbody>{body}</tbody></table>'


class Plot(Protocol):
    """A plot as an SVG element, None if there is nothing to draw; its title, and a note under the title."""

    @property
    def svg(self) -> str | None: ...

    @property
    def title(self) -> str: ...

    @property
    def note(self) -> str: ...


@dataclass(frozen=True)
class Pictures:
    """Plots side by side, for HTML alone. draw: makes them when they are needed, which takes a second."""

    draw: Callable[[], Iterable[Plot]]

    def lines(self) -> list[str]:
        """Nothing is printed."""
        return []

    def html(self) -> str:
        """The plots as images, so that their ids and styles cannot meet those of other cells of a notebook."""
        figures = "\n".join(_figure(plot.title, plot.note, plot.svg) for plot in self.draw() if plot.svg is not None)
        return f'<div style="display: flex; flex-wrap: wrap; gap: 1em; margin: .6em 0">\n{figures}\n</div>' if figures else ""


Part = Line | TitledTable | Pictures


class Displayed:
    """A result that prints as its command prints it. _laid_out_by: the module whose `parts_of(result)` lays it out.

    The module is named and not imported, because pages are made of results and so come after them in the order of imports.
    """

    _laid_out_by: ClassVar[str]

    def __str__(self) -> str:
        return "\n".join(line for part in self._parts() for line in part.lines())

    def _repr_html_(self) -> str:
        return "\n".join(["<div>", *filter(None, (part.html() for part in self._parts())), "</div>"])

    def _parts(self) -> list[Part]:
        return importlib.import_module(self._laid_out_by).parts_of(self)


def svg_document(svg: str) -> str:
    """An SVG element as a document of its own, with the XML namespace that it then needs."""
    # str: markup would escape the namespace. The page's colours are not known here, nor to programs without style sheets.
    alone = re.sub(r"var\(--\w+, (#\w+)\)", r"\1", str(svg))
    return alone.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def _figure(title: str, note: str, svg: str) -> str:
    data = base64.b64encode(svg_document(svg).encode("utf-8", "backslashreplace")).decode()
    under = f"<br><small>{_escaped(note)}</small>" if note else ""
    image = f'<img alt="{_escaped(title)}" src="data:image/svg+xml;base64,{data}" style="width: 100%; background: #fff">'
    return f'<figure style="margin: 0; width: 24em"><figcaption><b>{_escaped(title)}</b>{under}</figcaption>{image}</figure>'


def _row(cells: Sequence[str], kind: str) -> str:
    first, *others = map(_escaped, cells)
    rest = "".join(f'<{kind} style="text-align: right">{cell}</{kind}>' for cell in others)
    return f'<tr><th style="text-align: left">{first}</th>{rest}</tr>'


def _escaped(text: str) -> str:
    return escape(printable(text))
