"""kilolayer fill: a masked language model fills the masks of a text."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kilolayer.cli.configuration import whole
from kilolayer.cli.lines import Typed, together, typed_argument, typed_lines
from kilolayer.cli.output import show_json, write_text
from kilolayer.errors import unknown

if TYPE_CHECKING:
    from kilolayer.generate.fill import Filled
    from kilolayer.models.encoder import Encoder
    from kilolayer.training.run import Run

TEXTS_AT_ONCE = 32


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's own flags."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder of a masked language model")
    parser.add_argument("text", nargs="?", metavar="TEXT", help="with <mask> in it; without one, each line of standard input")
    parser.add_argument("--top", type=whole(1, 1000), default=5, metavar="N", help="tokens to show for each mask [5]")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the model runs [auto]")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of the products [fp32]")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Fill the masks; what was asked for is shown with the best tokens for each mask."""
    if typed:
        raise unknown(typed[0].partition("=")[0], ["--top", "--device", "--precision", "--json"])
    from kilolayer.models.encoder import Encoder
    from kilolayer.training.run import Run, choose_device

    opened = Run.open(options.run, ["masked_lm"])
    model = opened.load_reader(choose_device(options.device), options.precision)
    assert isinstance(model, Encoder)
    texts = typed_lines() if options.text is None else iter([typed_argument(options.text, "TEXT")])
    found = _filled(opened, model, texts, options.top)
    if options.json:
        show_json([dataclasses.asdict(each) for each in found])
    else:
        for each in found:
            _show(each)
    return 0


def _filled(run: Run, model: Encoder, texts: Iterator[Typed], top: int) -> Iterator[Filled]:
    from kilolayer.generate.fill import fill_texts, masked_tokens
    from kilolayer.tasks.masked_lm.config import MaskedLMConfig
    from kilolayer.tasks.masked_lm.task import MaskedLMTask

    assert isinstance(run.config, MaskedLMConfig)
    vocabulary, length = MaskedLMTask.load_vocabulary(run.config, run.folder), run.config.text.length
    for some in together(texts, TEXTS_AT_ONCE):
        rows = [masked_tokens(each.text, vocabulary, length, each.where) for each in some]
        yield from fill_texts(model, [each.text for each in some], rows, vocabulary, top)


def _show(filled: Filled) -> None:
    """The filled text, and below it a line a mask: tokens, in quotes because of their spaces, with their probabilities."""
    write_text(f"{filled.filled}\n")
    for number, guesses in enumerate(filled.masks, 1):
        shown = "  ".join(f"{guess.token!r} {guess.probability:.1%}" for guess in guesses)
        write_text(f"  {number}: {shown}\n")
    sys.stdout.flush()
