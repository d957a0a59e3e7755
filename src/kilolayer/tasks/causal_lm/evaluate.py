"""kilolayer evaluate for a language model: bits per byte and perplexity of its test set, or answers to question sets."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from kilolayer.cli.configuration import Flags, int_between
from kilolayer.cli.output import show_scores, show_scores_json
from kilolayer.errors import InputError, OptionError
from kilolayer.tasks.causal_lm import shots

if TYPE_CHECKING:
    from kilolayer.runs.run import Run


def add_flags(parser: Flags) -> None:
    """Add the flags that only language models have."""
    parser.add_argument(
        "--stride",
        type=int_between(1, 2**24),
        metavar="N",
        help="tokens from the start of one window to the next [text.stride]",
    )
    shots.add_flags(parser)


def evaluate(run: Run, options: argparse.Namespace) -> int:
    """Print the scores."""
    from kilolayer.tasks.causal_lm.config import CausalLMConfig

    if options.tasks is not None:
        for name in ("stride", "test"):
            if getattr(options, name):
                where, fix = "on the command line", "remove one of them"
                raise OptionError(f"--{name} has no effect with --tasks", where=where, fix=fix)
        return shots.evaluate(run, options)
    shots.refuse_flags(options)

    assert isinstance(run.config, CausalLMConfig)
    where, text = str(run.folder), run.config.text
    if options.stride is not None and options.stride > text.length:
        raise OptionError(f"--stride is {options.stride}", where=where, fix=f"allowed: 1 to text.length, {text.length}")
    if not text.test and not text.test_share and not options.test:
        raise InputError("the run has no test set", where=where, fix="name a text: --test")
    if options.test:
        scores = _scores_of(run, options)
    else:
        scores = run.scores(options.device) if options.stride is None else _scores(run, options.stride, options.device)
    if options.json:
        show_scores_json(scores)
    else:
        show_scores(scores, run.registration.headline)
    return 0


def _scores_of(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """The scores of another text."""
    from kilolayer.runs.scoring import score_text
    from kilolayer.tasks.causal_lm.config import CausalLMConfig
    from kilolayer.tasks.other_text import OtherText

    config = run.config
    assert isinstance(config, CausalLMConfig)
    if options.stride is not None:
        text = dataclasses.replace(config.text, test=options.test, test_share=0.0, stride=options.stride)
        run = dataclasses.replace(run, config=dataclasses.replace(config, text=text))
    return score_text(run, OtherText(tuple(options.test)), device=options.device)


def _scores(run: Run, stride: int, device: str) -> dict[str, Any]:
    """The scores with a stride other than the run's own."""
    from kilolayer.models.decoder import Decoder
    from kilolayer.runs.chosen import choose
    from kilolayer.runs.run import cache_folder, choose_device
    from kilolayer.tasks.causal_lm.task import CausalLMTask

    task = run.task(cache_folder())
    assert isinstance(task, CausalLMTask)
    chosen = choose(run.checkpoints, run.config)
    model = run.load_reader(choose_device(device, "device"), chosen=chosen)
    assert isinstance(model, Decoder)
    scores = {key: dataclasses.asdict(score) for key, score in task.test_scores(model, stride).items()}
    return {"test": scores, "weights": chosen.table()}
