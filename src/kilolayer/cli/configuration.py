"""The configuration of a command: defaults, then the file, then options on the command line."""

from __future__ import annotations

import argparse
import dataclasses
import re
import textwrap
import typing
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from kilolayer.config import DataclassInstance, RawConfig, choices_of, help_texts, load, option_paths, overrides, section_of
from kilolayer.errors import shown

Flags = argparse.ArgumentParser | argparse._ArgumentGroup


def split_typed(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into others and options of the configuration, `--section.name VALUE`; after `--` there are none."""
    others, typed = [], []
    end = words.index("--") if "--" in words else len(words)
    rest, after = list(words[:end]), list(words[end:])
    while rest:
        word = rest.pop(0)
        if word.startswith("--") and "." in word.partition("=")[0]:
            typed.append(word)
            if "=" not in word and rest and not rest[0].startswith("--"):
                typed.append(rest.pop(0))
        else:
            others.append(word)
    return others + after, typed


def read_tables(path: Path | None, typed: Sequence[str]) -> RawConfig:
    """The tables of a file, overridden by options such as `--model.dim 64`."""
    sources = [*([str(path)] if path is not None else []), *(["the command-line options"] if typed else [])]
    return RawConfig(load(path) if path is not None else {}, overrides(typed), tuple(sources))


def int_between(least: int, most: int) -> Callable[[str], int]:
    """An argparse type for a whole number within bounds."""

    def read_number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{shown(text)} is not a whole number") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be {least:,} to {most:,}, not {shown(value)}")
        return value

    return read_number


def add_device(parser: argparse.ArgumentParser, default: str = "auto") -> None:
    """Add the --device flag, for commands that run a model. default: the default as the help describes it."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=f"device to run on [{default}]")


def add_precision(parser: argparse.ArgumentParser) -> None:
    """Add the --precision flag, for commands that run a model."""
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16", "int8"),
        default="fp32",
        help="precision of the matrix products; bf16 is faster on a GPU, int8 on the CPU for a wide model [fp32]",
    )


class WrappedLines(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of a description or an epilog, and wraps each to the width of the terminal, with a hanging indent."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(_wrapped(f"{indent}{line}", width) for line in text.splitlines())


def _wrapped(line: str, width: int) -> str:
    """An option's text continues in its own column, and any other indented line four columns to the right of its start."""
    option, start = re.match(r" *\S+ {2,}", line), len(line) - len(line.lstrip())
    hanging = option.end() if option is not None else start + 4 if start else 0
    return textwrap.fill(
        line, width, subsequent_indent=" " * min(hanging, width // 2), break_long_words=False, break_on_hyphens=False
    )


def add_options(parser: argparse.ArgumentParser, cls: type[DataclassInstance], section: str = "") -> None:
    """Add the options of a configuration to a command's help, and to the names suggested for misspelled ones."""
    parser.formatter_class = WrappedLines
    parser.epilog = describe_options(cls, section)
    paths = [*option_paths(cls, section)]
    parser.set_defaults(
        typed_names=[f"--{path}" for path in paths if "." in path],
        file_names=[f"--{path}" for path in paths if "." not in path],
    )


def describe_options(cls: type[DataclassInstance], section: str = "", known: Collection[str] = ()) -> str:
    """The options of a configuration for a command's help, by section: name, text, choices, default.

    known: dotted names that are left out.
    """
    texts = help_texts(cls)
    hints = typing.get_type_hints(cls)
    lines, below = [], []
    for field in dataclasses.fields(cls):
        path = f"{section}.{field.name}".lstrip(".")
        if path in known:
            continue
        if (inner := section_of(hints[field.name])) is not None and not field.metadata.get("parse"):
            below.append(describe_options(inner, path, known))
            if field.default is not None or not below[-1]:
                continue
        default = field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            made = field.default_factory()
            default = getattr(made, "name", made)
        shown = "none" if default is None else str(default).lower() if isinstance(default, bool) else default
        choices = choices_of(hints[field.name]) or tuple(field.metadata.get("names", tuple)())
        numbers = f" ({field.metadata['range'].short})" if "range" in field.metadata else ""
        allowed = f" ({', '.join(choices)})" if len(choices) > 1 else numbers
        lines.append(f"  {field.name:<20} {texts.get(field.name, '')}{allowed} [{shown}]")
    title = f"[{section}] in the file, or --{section}.NAME VALUE on the command line:" if section else "at the top of the file:"
    return "\n\n".join(["\n".join([title, *lines]), *filter(None, below)] if lines else filter(None, below))
