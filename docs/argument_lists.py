"""Arguments that a docstring explains in its text ("lr: the learning rate. steps: ...") as a list in the reference."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe


class ArgumentLists(griffe.Extension):
    """Turns such explanations of functions and classes into lists before the page is made."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        self._rewrite(func, {parameter.name.lstrip("*") for parameter in func.parameters})

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        self._rewrite(cls, {name for name, member in cls.members.items() if member.is_attribute})

    def _rewrite(self, described: griffe.Function | griffe.Class, names: set[str]) -> None:
        if described.docstring is not None and names:
            described.docstring.value = listed(described.docstring.value, names)


def listed(text: str, names: set[str]) -> str:
    """The text with a list item for each of the names that it explains."""
    return "\n\n".join(_paragraph(part, names) for part in re.split(r"\n{2,}", text))


def _paragraph(text: str, names: set[str]) -> str:
    if text.startswith((" ", "-", "|", "```")):
        return text
    known = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    start = re.compile(rf"(?:^|(?<=[.;)]\s))((?:{known})(?:, (?:{known}))*): ")
    lead, *rest = start.split(text)
    items = [f"- {_code(names)}: {_joined(about)}" for names, about in zip(rest[::2], rest[1::2], strict=True)]
    return "\n\n".join(filter(None, [lead.strip(), "\n".join(items)]))


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def _joined(text: str) -> str:
    """One line; a semicolon before the next item becomes a full stop."""
    return re.sub(r";$", ".", " ".join(textwrap.dedent(text).split()))
