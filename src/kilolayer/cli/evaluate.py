"""kilolayer evaluate: a run's test scores with their signatures, and what its task adds."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from kilolayer.cli.configuration import add_device
from kilolayer.cli.output import show_scores, show_scores_json
from kilolayer.cli.task_flags import add_task_flags, refuse_foreign_flags
from kilolayer.errors import InputError, unknown
from kilolayer.tasks import registry
from kilolayer.tasks.other_text import OtherText
from kilolayer.tasks.results import tables_of_tests
from kilolayer.terminal import say


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags, and those of each task."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    add_device(parser)
    parser.add_argument(
        "--test",
        nargs="+",
        default=[],
        metavar="NAME",
        help="score this text instead of the run's test set: a set, files or folders, as in the run's option `test`",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_task_flags(parser, {task.name: task.evaluation for task in registry.all_of() if task.evaluation is not None})


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Print the scores."""
    from kilolayer.runs.last_saved import all_deleted
    from kilolayer.runs.run import Run
    from kilolayer.runs.scoring import score_text

    if typed:
        raise unknown(typed[0], ["--device", "--json", "--test", *options.owners])
    opened = Run.open(options.run)
    task = opened.registration
    if (gone := all_deleted(opened.checkpoints)) is not None:
        say(f"warning: {gone.what}")
    refuse_foreign_flags(options, task)
    if task.evaluation is not None:
        return importlib.import_module(task.evaluation).evaluate(opened, options)
    if options.test:
        scores = score_text(opened, OtherText(tuple(options.test)), device=options.device)
    else:
        scores = opened.scores(options.device)
    if not tables_of_tests(scores):
        raise InputError("the run has no test set", where=str(options.run), fix="name a text: --test")
    if options.json:
        show_scores_json(scores)
    else:
        show_scores(scores, task.headline)
    return 0
