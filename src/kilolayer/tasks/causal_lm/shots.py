"""kilolayer evaluate RUN --tasks ...: zero-shot and few-shot question sets for a language model."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kilolayer.cli.configuration import Flags, int_between
from kilolayer.cli.output import show_json, show_line, show_table
from kilolayer.errors import InputError, OptionError, WriteError, shown, unknown
from kilolayer.terminal import counted, say

if TYPE_CHECKING:
    from kilolayer.evaluate.shots.examples import Examples
    from kilolayer.evaluate.shots.registry import QuestionSet
    from kilolayer.evaluate.shots.score import ShotScore
    from kilolayer.runs.run import Run

MOST_SHOTS = 1000
DATA = "KILOLAYER_DATA"
OWN_FLAGS = ("shots", "examples", "limit", "seed")


def add_flags(parser: Flags) -> None:
    """Add the flags of this evaluation."""
    from kilolayer.evaluate.shots import SETS

    parser.add_argument("--tasks", metavar="NAME,...", help=f"question sets: {', '.join(sorted(SETS))}")
    parser.add_argument("--shots", metavar="N,...", help="number of solved examples before each question [0]")
    parser.add_argument(
        "--examples",
        type=Path,
        metavar="FOLDER",
        help=f"folder with the files NAME.val.jsonl [nlu/zeroshot in the folder ${DATA}]",
    )
    parser.add_argument(
        "--limit", type=int_between(1, 10**9), metavar="N", help="ask only the first N questions of each set [all]"
    )
    parser.add_argument("--seed", type=int_between(0, 2**63 - 1), help="seed for drawing the examples [0]")


def refuse_flags(options: argparse.Namespace) -> None:
    """Raise for flags that have no effect without --tasks."""
    for name in OWN_FLAGS:
        if getattr(options, name) is not None:
            raise OptionError(
                f"--{name} has no effect without --tasks", where="on the command line", fix="name question sets with --tasks"
            )


def evaluate(run: Run, options: argparse.Namespace) -> int:
    """Evaluate all sets with all numbers of shots, save the scores in the run folder if it is writable, and print them."""
    from kilolayer.evaluate.shots.examples import read_examples
    from kilolayer.evaluate.shots.score import score_set
    from kilolayer.evaluate.shots.score_file import add_scores, read_scores
    from kilolayer.models.decoder import Decoder
    from kilolayer.runs.chosen import choose
    from kilolayer.runs.run import choose_device
    from kilolayer.tasks.causal_lm.config import CausalLMConfig
    from kilolayer.tasks.causal_lm.task import CausalLMTask

    sets, shots, seed = _sets(options.tasks), _shots(options.shots or "0"), options.seed or 0
    if not any(shots) and options.seed is not None:
        raise OptionError("--seed has no effect without shots", where="on the command line", fix="remove it, or add --shots")
    folder = options.examples or _default_folder()
    asked = [read_examples(each, folder) for each in sets]
    for each in asked:
        each.check(max(shots), options.limit)
    read_scores(run.folder)
    chosen = choose(run.checkpoints, run.config)
    model = run.load_reader(choose_device(options.device, "device"), chosen=chosen)
    assert isinstance(model, Decoder)
    assert isinstance(run.config, CausalLMConfig)
    vocabulary, length = CausalLMTask.load_vocabulary(run.config, run.folder), run.config.text.length
    scores: list[ShotScore] = []
    for each in asked:
        for count in shots:
            say(_about(each, count, options.limit))
            found = score_set(model, vocabulary, length, each, shots=count, seed=seed, limit=options.limit)
            try:
                add_scores(run.folder, found, chosen.table())
            except WriteError as error:  # the run is read-only: its scores are still printed
                say(f"warning: these scores are printed but not saved: {error.what}: {error.where}")
            scores += found
            if found[0].cut:
                cut = counted(found[0].cut, "question")
                say(f"the beginning of {cut} was cut off: the model reads {length:,} tokens at once")
    _show(scores, as_json=options.json)
    return 0


def _sets(names: str) -> list[QuestionSet]:
    """The question sets with these names."""
    from kilolayer.evaluate.shots import SETS

    wanted = list(dict.fromkeys(names.split(",")))
    for name in wanted:
        if name not in SETS:
            raise unknown(name, SETS, kind="question set", where="--tasks")
    return [SETS[name] for name in wanted]


def _shots(text: str) -> list[int]:
    """The numbers in a list such as 0,1,4."""
    found = []
    for part in dict.fromkeys(text.split(",")):
        if not (part.isascii() and part.isdigit() and len(part) < 5 and int(part) <= MOST_SHOTS):
            raise OptionError(
                f"{shown(part)} is not a valid number of shots", where="--shots", fix=f"0 to {MOST_SHOTS}, as in 0,1,4"
            )
        found.append(int(part))
    return found


def _default_folder() -> Path:
    if not os.environ.get(DATA):
        raise InputError(
            "no folder with questions is given",
            where=f"neither --examples nor {DATA} is set",
            fix="give --examples FOLDER with files NAME.val.jsonl; docs/few-shot.md describes their columns",
        )
    return Path(os.environ[DATA]) / "nlu" / "zeroshot"


def _about(examples: Examples, shots: int, limit: int | None) -> str:
    count = len(examples.asked.questions[:limit])
    return f"{examples.set.name}: {counted(count, 'question')} after {counted(shots, 'example')}{' each' if shots else ''}"


def _show(scores: list[ShotScore], *, as_json: bool) -> None:
    if as_json:
        show_json([score.table() for score in scores])
        return
    header = ["set", "shots", "norm", "accuracy", "standard error", "chance", "questions"]
    rows = [
        [
            score.task,
            str(score.shots),
            score.norm,
            _percent(score.value),
            _percent(score.standard_error),
            _percent(score.chance),
            f"{score.questions:,}",
        ]
        for score in scores
        if score.metric == "accuracy"
    ]
    show_table("accuracy in percent, by how choices are compared", rows, header)
    others = [score for score in scores if score.metric == "perplexity"]
    if others:
        rows = [[score.task, str(score.shots), _number(score.value), _number(score.standard_error)] for score in others]
        show_table("perplexity of the last word", rows, ["set", "shots", "perplexity", "standard error"])
    for score in scores:
        show_line(score.signature)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
