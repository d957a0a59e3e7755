"""kilolayer generate: a language model continues prompts."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kilolayer.cli.configuration import add_precision, whole
from kilolayer.cli.lines import at_once, typed_argument, typed_lines
from kilolayer.cli.output import show_json, write_text
from kilolayer.errors import OptionError, unknown
from kilolayer.terminal import say

if TYPE_CHECKING:
    from kilolayer.generate.config import SearchConfig
    from kilolayer.runs.language_model import Continued, LanguageModel

SAMPLING = ("temperature", "top_k", "top_p", "seed", "samples")
SEPARATOR = "---"


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's own flags."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder of a language model")
    parser.add_argument("--prompt", metavar="TEXT", help="what to continue; without it, each line of standard input")
    parser.add_argument("--max-tokens", type=whole(1, 10**6), default=256, metavar="N", help="most tokens to write [256]")
    parser.add_argument("--greedy", action="store_true", help="the most probable token each time, in the place of sampling")
    parser.add_argument("--temperature", type=float, help="divides the scores: below 1 safer, above 1 more varied [1]")
    parser.add_argument("--top-k", type=whole(1, 2**24), metavar="N", help="sample from the N most probable tokens [all]")
    parser.add_argument("--top-p", type=float, metavar="P", help="from the fewest tokens that have this probability together")
    parser.add_argument("--samples", type=whole(1, 10_000), metavar="N", help="continuations of each prompt [1]")
    parser.add_argument("--seed", type=whole(0, 2**63 - 1), help="the same seed and prompt give the same text [0]")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to write [auto]")
    add_precision(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Continue the prompts; a single continuation is shown as it is written."""
    if typed:
        raise unknown(
            typed[0].partition("=")[0], ["--temperature", "--top-k", "--top-p", "--samples", "--max-tokens", "--seed"]
        )
    from kilolayer.runs.language_model import PROMPTS_AT_ONCE, LanguageModel
    from kilolayer.training.run import Run

    writer = LanguageModel(Run.open(options.run, ["causal_lm"]), device=options.device, precision=options.precision)
    search = _search(options, writer)
    typed_texts = typed_lines() if options.prompt is None else iter([typed_argument(options.prompt, "--prompt")])
    prompts = (each.text for each in typed_texts)
    results = writer.continuations(prompts, search, at_once=at_once(PROMPTS_AT_ONCE))
    if options.json:
        found = list(results)
        cut = sum(each.cut for each in found)
        show_json([_table(each) for each in found])
    elif options.prompt is not None and search.n_best == 1:
        cut = _stream(writer, next(prompts), search).cut
    else:
        cut = _print_all(results)
    if cut:
        beginning = f"the beginning of {cut} prompts was" if cut > 1 else "the beginning of the prompt was"
        say(f"{beginning} not read: the model reads {writer.context} tokens at once")
    return 0


def _table(continued: Continued) -> dict[str, Any]:
    """As JSON holds it."""
    return {"prompt": continued.prompt, "continuations": [dataclasses.asdict(each) for each in continued.continuations]}


def _stream(writer: LanguageModel, prompt: str, search: SearchConfig) -> Continued:
    """Print the prompt, and its continuation as it is written."""

    def write(text: str) -> None:
        write_text(text)
        sys.stdout.flush()

    write(prompt)
    continued = writer.stream(prompt, write, search)
    write("\n")
    return continued


def _search(options: argparse.Namespace, writer: LanguageModel) -> SearchConfig:
    given = {name: value for name in SAMPLING if (value := getattr(options, name)) is not None}
    if options.greedy and given:
        flag = f"--{next(iter(given)).replace('_', '-')}"
        raise OptionError(f"{flag} has no effect with --greedy", where="in the typed options", fix="remove one of them")
    try:
        return writer.search(max_tokens=options.max_tokens, greedy=options.greedy, **given)
    except OptionError as error:
        raise error.at("in the typed options") from None


def _print_all(results: Iterator[Continued]) -> int:
    """Print each continuation as it comes; return how many prompts were cut."""
    first, cut = True, 0
    for result in results:
        cut += result.cut
        for continuation in result.continuations:
            if not first:
                write_text(f"{SEPARATOR}\n")
            write_text(f"{result.prompt}{continuation.text}\n")
            sys.stdout.flush()
            first = False
    return cut
