"""kilolayer generate: continue prompts with a language model."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kilolayer.cli.configuration import add_device, add_precision, int_between
from kilolayer.cli.lines import lines_per_answer, typed_argument, typed_lines
from kilolayer.cli.output import show_json, write_text
from kilolayer.cli.search_flags import SAMPLING, add_search_flags, typed_search
from kilolayer.errors import OptionError
from kilolayer.terminal import counted, say

if TYPE_CHECKING:
    from kilolayer.generate.config import SearchConfig
    from kilolayer.tasks.causal_lm.language_model import Continued, LanguageModel

SEPARATOR = "---"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.set_defaults(reads_lines=True)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder of a language model")
    parser.add_argument("--prompt", metavar="TEXT", help="text to continue [each line of standard input]")
    parser.add_argument(
        "--max-tokens",
        type=int_between(1, 10**6),
        default=256,
        metavar="N",
        help="maximum number of tokens to generate [256]",
    )
    add_search_flags(parser, SAMPLING)
    parser.add_argument("--samples", type=int_between(1, 10_000), metavar="N", help="number of continuations per prompt [1]")
    add_device(parser)
    add_precision(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Continue the prompts; a single continuation is shown while it is generated."""
    from kilolayer.runs.run import Run
    from kilolayer.tasks.causal_lm.language_model import PROMPTS_AT_ONCE, LanguageModel

    if options.greedy and options.samples is not None:
        raise OptionError("--samples has no effect with --greedy", where="on the command line", fix="remove one of them")
    writer = LanguageModel(Run.open(options.run, ["causal_lm"]), device=options.device, precision=options.precision)
    more = {"max_tokens": options.max_tokens, "greedy": options.greedy, "samples": options.samples or 1}
    search = typed_search(options, typed, writer.search, **more)
    typed_texts = typed_lines() if options.prompt is None else iter([typed_argument(options.prompt, "--prompt")])
    prompts = (each.text for each in typed_texts)
    results = writer.continuations(prompts, search, at_once=lines_per_answer(PROMPTS_AT_ONCE))
    if options.json:
        found = list(results)
        cut = sum(each.cut for each in found)
        show_json([_table(each) for each in found])
    elif options.prompt is not None and search.n_best == 1:
        cut = _stream(writer, next(prompts), search).cut
    else:
        cut = _print_all(results)
    if cut:
        say(f"the beginning of {counted(cut, 'prompt')} was cut off: the model reads {writer.context} tokens at once")
    return 0


def _table(continued: Continued) -> dict[str, Any]:
    """The values for JSON."""
    return {"prompt": continued.prompt, "continuations": [dataclasses.asdict(each) for each in continued.continuations]}


def _stream(writer: LanguageModel, prompt: str, search: SearchConfig) -> Continued:
    """Print the prompt, then its continuation while it is generated."""

    before = iter([prompt])

    def write(text: str) -> None:
        # With the first piece, so that errors of the run are reported before anything is printed.
        write_text(next(before, "") + text)
        sys.stdout.flush()

    continued = writer.stream(prompt, write, search)
    write("\n")
    return continued


def _print_all(results: Iterator[Continued]) -> int:
    """Print each continuation as it is finished; return how many prompts were cut."""
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
