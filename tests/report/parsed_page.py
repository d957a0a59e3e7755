"""A page of HTML as tests look at it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "wbr", "br", "link", "img", "input"}


class Page(HTMLParser):
    """Checks that every element is closed in order; collects text, attributes, tags and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.headings = re.findall(r"<h2>(.*?)</h2>", text)
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)
        elif self.open and self.open[-1] == "script":
            self.scripts[-1] += data

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))
