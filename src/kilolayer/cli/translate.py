"""kilolayer translate: lines in, lines out, in order."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kilolayer.cli.configuration import describe_options
from kilolayer.config import Table, build, merge, overrides, table_of
from kilolayer.errors import OptionError, unknown

if TYPE_CHECKING:
    from kilolayer.data.tokenizer import Tokenizers


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's own flags."""
    from kilolayer.generate.config import SearchConfig

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = describe_options(SearchConfig, "search")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--direction", metavar="SOURCE-TARGET", help="of a run with several directions")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to translate [auto]")
    parser.add_argument("--n-best", action="store_true", help="all hypotheses: number of the line, score, text, by tabs")


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Translate standard input."""
    from kilolayer.data.tokenizer import Tokenizers
    from kilolayer.generate.config import SearchConfig
    from kilolayer.generate.translate import translate_lines
    from kilolayer.tasks.translation import SidedTokenizer
    from kilolayer.train.run import Run, choose_device

    opened = Run.open(options.run)
    table = overrides(typed)
    if any(section != "search" for section in table):
        raise unknown(next(iter(table)), ["search"], kind="section", where="options are typed as --search.NAME VALUE")
    search = build(SearchConfig, merge(_applicable(table_of(opened.config.search), table), table.get("search", {})), "search")
    if search.n_best > 1 and not options.n_best:
        raise OptionError(f"n_best={search.n_best} has no effect on plain output", fix="add --n-best")
    tokenizers = Tokenizers.load(opened.folder)
    prefix = _tag(opened.config.data.directions, options.direction, tokenizers)
    model = opened.load_model(choose_device(options.device))
    lines = _lines(sys.stdin.buffer)
    cut = 0
    for number, answer in enumerate(translate_lines(model, SidedTokenizer(tokenizers), lines, search, prefix=prefix), 1):
        cut += answer.cut
        if options.n_best:
            for score, text in zip(answer.scores, answer.texts, strict=True):
                print(number, f"{score:.4f}", text, sep="\t")
        else:
            print(answer.text)
        if number % 100 == 0:
            sys.stdout.flush()
            if sys.stderr.isatty():
                print(f"\r{number} lines", end="", file=sys.stderr, flush=True)
    if cut:
        print(f"{cut} lines were longer than search.max_source_length tokens and were cut", file=sys.stderr)
    return 0


def _tag(directions: list[str], chosen: str | None, tokenizers: Tokenizers) -> list[int]:
    """What stands before each source: the tag of the target language, in a run of several directions."""
    from kilolayer.data.parallel import Direction

    if chosen is not None and chosen not in directions:
        raise unknown(chosen, directions, kind="direction")
    if len(directions) == 1:
        return []
    if chosen is None:
        raise OptionError("the run has several directions", fix=f"say which: --direction {directions[0]}")
    return [tokenizers.source.tag_id(Direction.parse(chosen).target)]


def _applicable(settings: Table, typed: Table) -> Table:
    """The run's settings without those of its own method, where another method was typed."""
    from kilolayer.generate.config import OPTIONS_OF

    method = typed.get("search", {}).get("method", settings["method"])
    foreign = {name for other, names in OPTIONS_OF.items() if other != method for name in names}
    return {name: value for name, value in settings.items() if name not in foreign}


def _lines(stream: Iterator[bytes]) -> Iterator[str]:
    """Lines of standard input, split at line feeds alone; bytes that are no UTF-8 become U+FFFD."""
    for line in stream:
        yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", errors="replace")
