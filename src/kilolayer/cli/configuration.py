"""A verb's configuration: defaults, then the file, then what is typed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from kilolayer.config import Config, DataclassInstance, build, help_texts, load, merge, overrides
from kilolayer.errors import OptionError


def split_typed(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words without, and the words of, options of the configuration: `--section.name VALUE`."""
    others, typed = [], []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("--") and "." in word.partition("=")[0]:
            typed.append(word)
            if "=" not in word and rest and not rest[0].startswith("--"):
                typed.append(rest.pop(0))
        else:
            others.append(word)
    return others, typed


def read(cls: type[Config], path: Path | None, typed: Sequence[str]) -> Config:
    """The configuration `cls` from a file and from typed options such as `--model.dim 64`."""
    table = merge(load(path) if path is not None else {}, overrides(typed))
    try:
        return build(cls, table)
    except OptionError as error:
        sources = [*([str(path)] if path is not None else []), *(["the typed options"] if typed else [])]
        raise error.at(f"in {' and '.join(sources)}") from None


def describe_options(section: str, cls: type[DataclassInstance]) -> str:
    """The options of one section for a verb's help: name, default, text."""
    texts = help_texts(cls)
    lines = [f"options of the configuration, in a file under [{section}] or typed as --{section}.NAME VALUE:"]
    for field in dataclasses.fields(cls):
        default = field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = getattr(field.default_factory(), "name", "")
        shown = "absent" if default is None else str(default).lower() if isinstance(default, bool) else default
        lines.append(f"  {field.name:<20} {texts.get(field.name, '')} [{shown}]")
    return "\n".join(lines)
