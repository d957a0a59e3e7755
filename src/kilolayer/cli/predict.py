"""kilolayer predict: a classifier labels the sentences of each line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kilolayer.cli.lines import together, typed_lines
from kilolayer.cli.output import show_json, write_text
from kilolayer.errors import InputError, unknown
from kilolayer.terminal import counted, say

if TYPE_CHECKING:
    from kilolayer.models.model import Model
    from kilolayer.training.run import Run

LINES_AT_ONCE = 1024


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's own flags."""
    parser.set_defaults(reads_lines=True)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder of a classifier")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the model runs [auto]")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of the matrix products [fp32]")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Label the lines of standard input: a sentence each, or two with a tab between them."""
    if typed:
        raise unknown(typed[0].partition("=")[0], ["--device", "--precision", "--json"])
    from kilolayer.training.run import Run, choose_device

    opened = Run.open(options.run, ["classify"])
    labeller = Labeller(opened, opened.load_reader(choose_device(options.device), options.precision))
    rows = (labeller.sentences_of(line.text, line.where) for line in typed_lines())
    results = (result for some in together(rows, LINES_AT_ONCE) for result in labeller.results(some))
    if options.json:
        show_json(list(results))
    else:
        for result in results:
            write_text(f"{_line(result)}\n")
            if sys.stdin.isatty():
                sys.stdout.flush()
    if labeller.cut:
        say(f"{counted(labeller.cut, 'line')} longer than examples.length tokens: cut")
    return 0


class Labeller:
    """A run's model, and how it labels lines."""

    def __init__(self, run: Run, model: Model) -> None:
        from kilolayer.models.encoder import Encoder
        from kilolayer.tasks.classify.config import ClassifyConfig
        from kilolayer.tasks.classify.task import ClassifyTask

        assert isinstance(run.config, ClassifyConfig)
        assert isinstance(model, Encoder)
        self.model, self.config = model, run.config.examples
        self.vocabulary = ClassifyTask.load_vocabulary(run.config, run.folder)
        self.classes = self.config.classes
        self.sentences = 1 if self.config.columns("train").second is None else 2
        self.cut = 0

    def results(self, rows: list[list[str]]) -> list[dict[str, Any]]:
        """Each row with its label and the probabilities of all classes, or with its number."""
        from kilolayer.data.example_batches import EncodedExamples
        from kilolayer.data.example_file import Example
        from kilolayer.evaluate.predictions import predict, probabilities

        examples = [Example(row[0], row[1] if len(row) > 1 else None, None, 0) for row in rows]
        encoded = EncodedExamples(examples, self.vocabulary, self.classes, self.config.length)
        self.cut += encoded.cut
        scores = predict(self.model, encoded, min(self.config.rows, len(rows)))
        texts = [dict(zip(("first", "second"), row, strict=False)) for row in rows]
        if not self.classes:
            return [{**text, "number": float(score[0])} for text, score in zip(texts, scores, strict=True)]
        return [
            {**text, "label": self.classes[int(share.argmax())], "probabilities": dict(zip(self.classes, share, strict=True))}
            for text, share in zip(texts, probabilities(scores), strict=True)
        ]

    def sentences_of(self, text: str, where: str) -> list[str]:
        """What stands between the tabs of a line."""
        row = [sentence.strip() for sentence in text.split("\t")]
        if len(row) != self.sentences:
            wanted = "one sentence" if self.sentences == 1 else "two sentences, with a tab between them,"
            raise InputError(f"the run reads {wanted} of a line, and this one has {len(row)}", where=where, fix="mend the line")
        if not all(row):
            raise InputError("a sentence is empty", where=where, fix="fill it in, or remove the line")
        return row


def _line(result: dict[str, Any]) -> str:
    """The label, then each class with its probability; or the number."""
    if "number" in result:
        return f"{result['number']:.4f}"
    shares = (f"{name}={share:.4f}" for name, share in result["probabilities"].items())
    return "\t".join([result["label"], *shares])
