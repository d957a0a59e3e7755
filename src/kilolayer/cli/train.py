"""kilolayer train: from text files to a scored model, in a run folder."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kilolayer.cli.configuration import add_options, describe_options
from kilolayer.cli.output import show_json, show_line, show_samples, show_scores, tables_of_tests
from kilolayer.cli.prepared import read_started
from kilolayer.config import option_places
from kilolayer.errors import InputError, OptionError
from kilolayer.tasks import registry
from kilolayer.terminal import command, how_to_reach, leave_stdout, say, speaks, under_torchrun

if TYPE_CHECKING:
    from kilolayer.parallel.processes import Processes
    from kilolayer.report.page import Report
    from kilolayer.tasks.config import RunConfig
    from kilolayer.tasks.task import Task
    from kilolayer.training.run import Run
    from kilolayer.training.stop import Stop


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's own flags."""
    add_run_options(parser)
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG.toml", help="without it: the embedded default")
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="new run folder [runs/NAME of the configuration]")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with a run, exactly from its last checkpoint")
    parser.add_argument("--json", action="store_true", help="print the scores as one JSON document")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """The options that all tasks share, then each task with its own."""
    from kilolayer.tasks.config import RunConfig

    add_options(parser, RunConfig)
    shared = set(option_places(RunConfig))
    texts, places = [parser.epilog or ""], set(shared)
    for task in registry.all_of():
        config = task.load_config()
        own = describe_options(config, known=shared).replace("\n", "\n  ")
        texts.append(f'task = "{task.name}": {task.summary}\n\n  {own}')
        places |= set(option_places(config))
    parser.epilog = "\n\n".join(texts)
    parser.set_defaults(typed_names=[f"--{place}" for place in sorted(places) if "." in place])


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Train, then score the test part and write the report. Of several processes the first makes, holds and ends the run."""
    from kilolayer.parallel.parent import when_parent_dies
    from kilolayer.training.stop import Stopped, catching

    resume = options.resume is not None
    if resume and (options.config is not None or options.run is not None or typed):
        raise OptionError(
            "--resume takes no configuration, no --run and no options",
            fix="the run folder holds them all; a new run may use --train.start_from",
        )
    path = options.config or registry.EMBEDDED
    folder = options.resume or options.run or Path("runs") / path.stem
    with catching() as stop:
        if under_torchrun():
            when_parent_dies(os.getppid(), stop.orphaned)
        try:
            with stop.at_once():
                return _train(folder, path, options, typed, stop)
        except Stopped as ended:
            stop.heed()
            if speaks():
                say(_how_to_go_on(folder))
            return 128 + ended.number


def _how_to_go_on(folder: Path) -> str:
    if (folder / "config.toml").exists():
        return f"stopped by a signal; go on with: {command()} train --resume {folder}"
    return "stopped by a signal: nothing was begun that could be resumed; the same command starts anew"


def _train(folder: Path, path: Path, options: argparse.Namespace, typed: list[str], stop: Stop) -> int:
    from kilolayer.parallel.processes import Processes
    from kilolayer.training.loop import train
    from kilolayer.training.run import Run

    resume = options.resume is not None
    with ExitStack() as held:
        with Processes.of_environment() as processes:
            with processes.in_turn():
                if not processes.first:
                    opened = Run.open(folder)
                elif resume:
                    opened = held.enter_context(_old_run(folder))
                else:
                    opened = held.enter_context(_new_run(folder, path, typed, processes))
                task = _data_of(opened, processes)
            code = 0 if task is None else train(opened, task, resume, processes, stop)
        return code or (_finish(opened, options.json) if processes.first else 0)


@contextmanager
def _old_run(folder: Path) -> Iterator[Run]:
    """A run that was created before, in its locked folder."""
    from kilolayer.training.run import Run, locked

    opened = Run.open(folder)
    with locked(folder):
        yield opened


@contextmanager
def _new_run(folder: Path, path: Path, typed: list[str], processes: Processes) -> Iterator[Run]:
    """A run in a locked new folder. Everything that can be refused is refused here, before any work."""
    from kilolayer.data.grammar import write_corpus
    from kilolayer.training.run import Run, cache_folder, check_new, in_steps, locked, prepare
    from kilolayer.training.start import vocabulary_of

    below = {"data": {"folder": str(folder / "data")}} if path == registry.EMBEDDED else None
    config, start = read_started(path, typed, below)
    _check_means(config, processes)
    check_new(folder)
    with locked(folder):
        if path == registry.EMBEDDED:
            write_corpus(folder / "data")
        task = prepare(config, cache_folder(), vocabulary_of(start, config))
        config = in_steps(task.resolve(config), task, processes.size)
        if start is not None:
            _check_start(start, task, config)
            config = replace(config, train=replace(config.train, start_from=str(start.folder)))
        yield Run.create(folder, config, task.vocabulary)


def _check_start(start: Run, task: Task, config: RunConfig) -> None:
    """Refuse other tokens and another model than those of the run to start from."""
    from kilolayer.models.build import build_model
    from kilolayer.training.run import check_fit
    from kilolayer.training.start import other_vocabulary

    if start.vocabulary().digest != task.vocabulary.digest:
        raise other_vocabulary(start)
    there, here = (0 if each.model.moe is None else each.model.moe.experts for each in (start.config, config))
    if there != here:
        raise InputError(
            f"the run to start from has {there or 'no'} experts in a layer, and this one {here or 'none'}",
            where=str(start.folder),
            fix=f"set model.moe.experts to {there}" if there else "remove model.moe: a dense model is not made sparse",
        )
    theirs, ours = (build_model(each.model, device="meta", seed=0) for each in (start.config, config))
    check_fit(ours, task.adopt(theirs.state_dict(), ours.state_dict()), start.folder)


def _check_means(config: RunConfig, processes: Processes) -> None:
    """Refuse what this machine does not have, a device for each process or a package, and what these processes cannot do."""
    from kilolayer.training.metrics import summary_writer
    from kilolayer.training.run import choose_device

    processes.check(choose_device(config.train.device))
    if config.train.tensorboard:
        summary_writer()
    if processes.group is not None and config.model.moe is not None:
        processes.group.part(config.model.moe.experts)
        config.check_sharing()


def _data_of(run: Run, processes: Processes) -> Task | None:
    """What the run trains on; None where it is finished."""
    from kilolayer.training.run import cache_folder

    if (run.folder / "scores.json").exists():
        if processes.first:
            again = f"a new run goes on from its weights: --train.start_from {run.folder}"
            say(f"{run.folder} is finished: nothing to do; {again}")
        return None
    _check_means(run.config, processes)
    return run.task(cache_folder())


def _finish(run: Run, as_json: bool) -> int:
    """Score the test part once, write the report, and show both."""
    from kilolayer.report.page import write_report

    scores = run.scores(run.config.train.device)
    report = write_report(run.folder)
    try:
        _show(run, scores, report, as_json)
        sys.stdout.flush()
    except OSError:
        leave_stdout()  # nobody reads the results: the run has them
    return 0


def _show(run: Run, scores: dict[str, Any], report: Report, as_json: bool) -> None:
    from kilolayer.tasks.results import read_samples

    tests = tables_of_tests(scores)
    if as_json:
        show_json(tests)
        return
    task = run.registration
    show_samples(read_samples(run.folder)[:5], None if task.samples is None else task.samples.line)
    show_scores(scores)
    for line in (*report.warnings, f"report: {report.path}"):
        say(line)
    say(f"next: {command()} {task.usage.format(run.folder)}")
    say(f"or your own text: {command()} train --help")
    if (reach := how_to_reach()) is not None:
        say(reach)
    if len(tests) == 1 and (headline := task.headline) is not None:
        (entry,) = tests.values()
        if "value" in (score := entry.get(headline.key, {})):
            show_line(f"{score.get('name', headline.title)} {score['value']:.{headline.digits}f}")
