"""Equations of the pages, $inline$ and $$displayed$$, as MathML, which browsers draw without a script."""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

CODE = r"```.*?```|`[^`\n]*`"
EQUATION = re.compile(
    rf"(?P<code>{CODE})|\$\$(?P<block>[^$]+)\$\$|(?<![\\\w$])\$(?P<line>\S|\S[^$\n]*\S)\$(?!\w)", flags=re.DOTALL
)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace every equation outside of code."""
    return EQUATION.sub(_converted, markdown)


def _converted(found: re.Match[str]) -> str:
    if found["code"]:
        return found[0]
    if found["block"]:
        return convert(found["block"].strip(), display="block")
    # Markdown takes a line that begins with <math> for a paragraph of its own.
    return f"<span>{convert(found['line'].replace(chr(92) + '|', '|'))}</span>"
