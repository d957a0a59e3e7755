"""The templates of pages: whatever a run holds is escaped; only plots and our own files come as markup."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup


def template(name: str) -> Template:
    """A template by the name of its file."""
    return _environment().get_template(name)


@functools.cache
def asset(name: str) -> Markup:
    """The text of a file beside the templates, as it is: a script, whose braces are not ours to fill."""
    return Markup(resources.files("kilolayer.report").joinpath("templates", name).read_text(encoding="utf-8"))


@functools.cache
def script(*names: str) -> tuple[Markup, str]:
    """Files beside the templates as one script, and the hash by which a page allows it and no other."""
    text = Markup("").join(map(asset, names))
    return text, base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def script_json(data: Any) -> Markup:
    """JSON for a script element: without the characters that could end it, whatever a name holds."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


@functools.cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("kilolayer.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
