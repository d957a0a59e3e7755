"""kilolayer predict: label the sentences of each line with a classifier."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kilolayer.cli.configuration import add_device
from kilolayer.cli.lines import lines_per_answer, typed_lines
from kilolayer.cli.output import show_json, write_text
from kilolayer.errors import unknown
from kilolayer.terminal import counted, say

if TYPE_CHECKING:
    from kilolayer.tasks.classify.classifier import Prediction


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.set_defaults(reads_lines=True)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder of a classifier")
    add_device(parser)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="precision of the matrix products [fp32]")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Label the lines of standard input, each with one sentence, or two separated by a tab."""
    if typed:
        raise unknown(typed[0].partition("=")[0], ["--device", "--precision", "--json"])
    from kilolayer.runs.run import Run
    from kilolayer.tasks.classify.classifier import ROWS_AT_ONCE, Classifier

    classifier = Classifier(Run.open(options.run, ["classify"]), device=options.device, precision=options.precision)
    rows = (classifier.sentences_of(line.text, line.where) for line in typed_lines())
    cut, tables = 0, []
    for prediction in classifier.predictions(rows, at_once=lines_per_answer(ROWS_AT_ONCE)):
        cut += prediction.cut
        if options.json:
            tables.append(_table(prediction))
            continue
        write_text(f"{_line(prediction)}\n")
        if sys.stdin.isatty():
            sys.stdout.flush()
    if options.json:
        show_json(tables)
    if cut:
        say(f"{counted(cut, 'line')} longer than examples.length tokens: truncated")
    return 0


def _table(prediction: Prediction) -> dict[str, Any]:
    """The values for JSON."""
    texts = dict(zip(("first", "second"), prediction.sentences, strict=False))
    if not prediction.probabilities:
        return {**texts, "number": prediction.label}
    return {**texts, "label": prediction.label, "probabilities": prediction.probabilities}


def _line(prediction: Prediction) -> str:
    """The label, then each class with its probability; or the number."""
    if not prediction.probabilities:
        return f"{prediction.label:.4f}"
    shares = (f"{name}={share:.4f}" for name, share in prediction.probabilities.items())
    return "\t".join([str(prediction.label), *shares])
