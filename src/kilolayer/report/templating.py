"""The templates of pages: whatever a run holds is escaped; only plots and our own files come as markup."""

from __future__ import annotations

import functools
from importlib import resources

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
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("kilolayer.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
