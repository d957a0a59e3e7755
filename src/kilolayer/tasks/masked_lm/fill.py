"""kilolayer fill: fill the masks of a text with a masked language model."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kilolayer.cli.configuration import add_device, int_between
from kilolayer.cli.lines import lines_per_answer, typed_argument, typed_lines
from kilolayer.cli.output import show_json, write_text
from kilolayer.errors import unknown

if TYPE_CHECKING:
    from kilolayer.generate.fill import Filled


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder of a masked language model")
    parser.add_argument("text", nargs="?", metavar="TEXT", help="a text with <mask> in it [each line of standard input]")
    parser.add_argument("--top", type=int_between(1, 1000), default=5, metavar="N", help="tokens to show for each mask [5]")
    add_device(parser)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="precision of the matrix products [fp32]")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Fill the masks; each result is shown with the best tokens for each mask."""
    if typed:
        raise unknown(typed[0].partition("=")[0], ["--top", "--device", "--precision", "--json"])
    from kilolayer.runs.run import Run
    from kilolayer.tasks.masked_lm.masked_language_model import TEXTS_AT_ONCE, MaskedLanguageModel

    filler = MaskedLanguageModel(Run.open(options.run, ["masked_lm"]), device=options.device, precision=options.precision)
    texts = typed_lines() if options.text is None else iter([typed_argument(options.text, "TEXT")])
    found = filler.fillings(texts, top=options.top, at_once=lines_per_answer(TEXTS_AT_ONCE))
    if options.json:
        show_json([dataclasses.asdict(each) for each in found])
    else:
        for each in found:
            _show(each)
    return 0


def _show(filled: Filled) -> None:
    """Print the filled text, then a line per mask: tokens, in quotes because of their spaces, with their probabilities."""
    write_text(f"{filled.filled}\n")
    for number, guesses in enumerate(filled.masks, 1):
        shown = "  ".join(f"{guess.token!r} {guess.probability:.1%}" for guess in guesses)
        write_text(f"  {number}: {shown}\n")
    sys.stdout.flush()
