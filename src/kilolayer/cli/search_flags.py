"""Flags of commands that generate text: how the next token, or the best translation, is searched for."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kilolayer.cli.configuration import int_between
from kilolayer.config import help_texts
from kilolayer.errors import OptionError

if TYPE_CHECKING:
    from kilolayer.generate.config import SearchConfig

SAMPLING = ("temperature", "top_k", "top_p", "seed")


def add_search_flags(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Add --greedy, and a flag for each of these search options: `--top-k` for top_k."""
    from kilolayer.generate.config import SearchConfig

    texts, hints = help_texts(SearchConfig), typing.get_type_hints(SearchConfig)
    defaults = {field.name: field for field in dataclasses.fields(SearchConfig)}
    parser.add_argument("--greedy", action="store_true", help="the most probable token at each step")
    for name in names:
        ends = defaults[name].metadata["range"]
        is_whole = float not in (hints[name], *typing.get_args(hints[name]))
        read = int_between(int(ends.least), int(ends.most)) if is_whole else float
        parser.add_argument(f"--{name.replace('_', '-')}", type=read, metavar="N" if is_whole else "X", help=texts[name])


def typed_search(
    options: argparse.Namespace, typed: Sequence[str], search: Callable[..., SearchConfig], **more: Any
) -> SearchConfig:
    """The search options that `search` returns for the options on the command line and for `more`.

    typed: options of the form `--section.name`, which these commands do not have.
    """
    from kilolayer.generate.config import OPTIONS_OF, SearchConfig

    if typed:
        short = typed[0].partition("=")[0].rpartition(".")[2].replace("_", "-")
        raise OptionError(
            f"unknown option {typed[0].partition('=')[0]!r}",
            where="on the command line",
            fix=f"give options of the search without a table, such as --beam or --temperature: --{short}, if it exists",
        )
    names = [field.name for field in dataclasses.fields(SearchConfig)]
    given: dict[str, Any] = {name: value for name in names if (value := getattr(options, name, None)) is not None}
    if given.get("temperature") == 0:
        raise OptionError(
            "--temperature is 0", where="on the command line", fix="--greedy takes the most probable token at each step"
        )
    asked = {name: method for method, own in OPTIONS_OF.items() for name in own if name in given}
    asked |= {"greedy": "greedy"} if options.greedy else {}
    first = next(iter(asked), "")
    for name, method in asked.items():
        if method != asked[first]:
            raise OptionError(
                f"--{first.replace('_', '-')} and --{name.replace('_', '-')} ask for different searches",
                where="on the command line",
                fix="remove one of them",
            )
    try:
        return search(**given, **more)
    except OptionError as error:
        raise error.at("on the command line") from None
