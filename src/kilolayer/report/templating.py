"""The HTML templates: everything that comes from a run is escaped; only plots and the package's own files are markup."""

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
    """Load a template by its file name."""
    return _environment().get_template(name)


@functools.cache
def asset(name: str) -> Markup:
    """The text of a file next to the templates, such as a script, without template substitution."""
    return Markup(resources.files("kilolayer.report").joinpath("templates", name).read_text(encoding="utf-8"))


@functools.cache
def script(*names: str) -> tuple[Markup, str]:
    """Join files next to the templates into one script; returns it and its hash for the content security policy."""
    text = Markup("").join(map(asset, names))
    return text, base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def script_json(data: Any) -> Markup:
    """JSON for a script element, with the characters escaped that could end the element."""
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
