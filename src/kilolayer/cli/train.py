"""kilolayer train: from text files to a scored model in a run folder."""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kilolayer.cli.configuration import add_options, describe_options, read_tables
from kilolayer.cli.output import show_json, show_parts, show_scores
from kilolayer.config import option_paths, overrides
from kilolayer.errors import OptionError
from kilolayer.tasks import registry
from kilolayer.terminal import abandon_stdout, activation_hint, command, say

if TYPE_CHECKING:
    from kilolayer.parallel.processes import Processes
    from kilolayer.report.page import Report
    from kilolayer.runs.run import Run


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    add_run_options(parser)
    parser.epilog = f"{_resumable_options()}\n\n{parser.epilog}"
    parser.add_argument(
        "config", nargs="?", type=Path, metavar="CONFIG.toml", help="a configuration file [the embedded default]"
    )
    parser.add_argument(
        "--run", type=Path, metavar="FOLDER", help="the new run folder [runs/NAME, after the configuration's file name]"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FOLDER",
        help="resume a run exactly from its last checkpoint; with a larger --train.steps, also one that is finished",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="delete the run that is already in the folder, and train it anew"
    )
    parser.add_argument("--json", action="store_true", help="print the scores as one JSON document")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all tasks share, then those of each task."""
    from kilolayer.tasks.config import RunConfig

    add_options(parser, RunConfig)
    shared = set(option_paths(RunConfig))
    texts, paths = [parser.epilog or ""], set(shared)
    for task in registry.all_of():
        config = task.load_config()
        own = describe_options(config, known=shared).replace("\n", "\n  ")
        texts.append(f'task = "{task.name}": {task.summary}\n\n  {own}')
        paths |= set(option_paths(config))
    parser.epilog = "\n\n".join(texts)
    parser.set_defaults(typed_names=[f"--{path}" for path in sorted(paths) if "." in path])


def _resumable_options() -> str:
    """The options that may be given with --resume."""
    from kilolayer.runs.changes import may_change

    found = may_change(*(task.load_config().resume for task in registry.all_of()))
    lines = [f"  {why}: {', '.join(paths)}" for why, paths in found.items()]
    return "\n".join(["with --resume, these options can be given, or edited in the run's config.toml:", *lines])


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Train, score the test set and write the report. Only the first of several processes creates, locks and ends the run."""
    from kilolayer.training.stop import stoppable_run

    resume = options.resume is not None
    if resume and (options.config is not None or options.run is not None):
        raise OptionError(
            "--resume takes no configuration and no --run",
            fix="the run folder has its own; give only the options to change, such as --train.steps 20000",
        )
    if resume and options.overwrite:
        raise OptionError("--resume continues a run and --overwrite deletes it", fix="remove one of them")
    path = options.config or registry.EMBEDDED
    folder = options.resume or options.run or Path("runs") / path.stem

    def begin(processes: Processes) -> AbstractContextManager[Run]:
        from kilolayer.runs.begin import new_run, old_run

        if resume:
            return old_run(folder, overrides(typed))
        given, is_embedded = read_tables(path, typed), path == registry.EMBEDDED
        return new_run(folder, given, processes, is_embedded=is_embedded, overwrite=options.overwrite)

    is_example = not resume and path == registry.EMBEDDED
    show = partial(_show_all, as_json=options.json, is_example=is_example)
    with stoppable_run(folder) as stop:
        # Imported here because it takes seconds, in which signals must already be handled.
        from kilolayer.training.loop import train_run

        return train_run(folder, begin, stop, resume=resume, show=show)


def _show_all(run: Run, scores: dict[str, Any], report: Report, *, as_json: bool, is_example: bool) -> None:
    try:
        _show(run, scores, report, as_json, is_example)
        sys.stdout.flush()
    except OSError:
        abandon_stdout()  # nobody reads the results, but they are saved in the run folder


def _show(run: Run, scores: dict[str, Any], report: Report, as_json: bool, is_example: bool) -> None:
    from kilolayer.report.run_parts import headline_parts, sample_parts
    from kilolayer.tasks.results import read_samples, tables_of_tests

    if as_json:
        show_json(tables_of_tests(scores))
        return
    task = run.registration
    show_parts(sample_parts(read_samples(run.folder), task))
    show_scores(scores, task.headline)
    for line in (*report.warnings, f"report: {report.path}"):
        say(line)
    say(f"next: {command()} {run.config.usage.format(run.folder)}")
    if is_example:
        say(f"to train on your own text: {command()} train --help")
    if (reach := activation_hint()) is not None:
        say(reach)
    show_parts(headline_parts(scores, task))
