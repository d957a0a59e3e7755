"""Trains from a configuration to a scored run with its report; used by both the command and Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kilolayer import hints
from kilolayer.errors import OptionError, shown
from kilolayer.files.paths import as_path
from kilolayer.parallel.parent import when_parent_dies
from kilolayer.runs.config_source import Source, new_folder, plain_tables, read_source
from kilolayer.terminal import say, under_torchrun, writes_to_terminal
from kilolayer.torch_state import own_torch_state
from kilolayer.training.stop import Stop, Stopped, handle_signals

if TYPE_CHECKING:
    from kilolayer.parallel.processes import Processes
    from kilolayer.report.page import Report
    from kilolayer.runs.run import Run
    from kilolayer.runs.trackers import Tracker
    from kilolayer.runs.trained_run import TrainedRun

Begin = Callable[["Processes"], AbstractContextManager["Run"]]
Show = Callable[["Run", dict[str, Any], "Report"], None]


def train(
    config: Source = None,
    *,
    run: str | PathLike[str] | None = None,
    resume: str | PathLike[str] | bool | None = None,
    overwrite: bool = False,
    trackers: Sequence[Tracker] = (),
    **tables: Any,
) -> TrainedRun:
    """Train a run as `kilolayer train` does, and return it as `kl.load` does: `kl.train("my.toml", train={"steps": 500})`.

    config: a TOML file, a dict of tables, a configuration, or None for the embedded default.
    tables: values that override it, `model={"recipe": "sub_ln"}`.
    run: the new run folder; by default runs/NAME, after the file.
    resume: the folder of a run to resume, instead of config and run. True: resume the run that is already in the folder `run`,
    or start it there, so that a cell can be repeated. A finished run is returned.
    overwrite: delete the run that is already in the folder `run`, once the new one has been prepared.
    trackers: objects that receive the run's metrics.

    An interrupt saves a checkpoint and raises KeyboardInterrupt; a second one does not wait for the checkpoint. Signals are
    handled only in the main thread. The random state and the number of threads of torch are restored afterwards; because a
    process has only one of each, it is refused while another thread trains, forecasts or diagnoses.
    """
    from kilolayer.runs.begin import new_run, old_run, same_run
    from kilolayer.runs.load import load
    from kilolayer.runs.run import Run
    from kilolayer.runs.trackers import check_tracker

    over = plain_tables(tables)
    if not isinstance(trackers, Sequence) or isinstance(trackers, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(f"trackers is {shown(trackers)}", fix="give a list of objects: trackers=[MyTracker()]")
    for number, tracker in enumerate(trackers, 1):
        check_tracker(tracker, f"trackers, number {number}")
    if not isinstance(overwrite, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(f"overwrite is {shown(overwrite)}", fix="give True or False")
    resume = None if resume is False else resume
    if overwrite and resume is not None:
        raise OptionError("resume continues a run and overwrite deletes it", fix="remove one of them")
    if resume not in (None, True) and (config is not None or run is not None):
        fix = "remove them: the folder to resume has its own; or give resume=True"
        raise OptionError("resume takes no configuration and no run", fix=fix)
    given = read_source(config, over) if resume in (None, True) else None
    folder = new_folder(config, run) if isinstance(resume, bool | None) else as_path(resume, "resume")

    def begin(processes: Processes) -> AbstractContextManager[Run]:
        if given is None:
            return old_run(folder, over)
        if resume:
            return same_run(folder, given, processes, is_embedded=config is None)
        return new_run(folder, given, processes, is_embedded=config is None, overwrite=overwrite)

    with own_torch_state("kl.train"):
        code = train_run(folder, begin, resume=resume is not None, show=_print_report, trackers=trackers)
    if code:
        raise Stopped(code - 128, _resume_hint(folder))
    return load(folder, device=Run.open(folder).config.train.device)


def _print_report(run: Run, scores: dict[str, Any], report: Report) -> None:
    for line in (*report.warnings, f"report: {report.path}"):
        say(line)


def train_run(folder: Path, begin: Begin, *, resume: bool, show: Show, trackers: Sequence[Tracker] = ()) -> int:
    """Train the run in `folder`, score its test set and write its report; return the exit code.

    begin: creates or opens the run and holds its lock; only the first of several processes calls it. resume: whether training
    continues from the last checkpoint; after a restart by torchrun it always does. show: called with the run, the contents of
    scores.json and the report. trackers: in addition to those that the configuration names.
    """
    with handle_signals() as stop:
        if under_torchrun():
            when_parent_dies(os.getppid(), stop.on_parent_death)
        try:
            with stop.raising_at_once():
                return _train(folder, begin, resume, show, stop, trackers)
        except Stopped as ended:
            stop.acknowledge()
            if writes_to_terminal():
                say(f"stopped by a signal; {_resume_hint(folder)}")
            return 128 + ended.number


def _train(folder: Path, begin: Begin, resume: bool, show: Show, stop: Stop, trackers: Sequence[Tracker]) -> int:
    # Imported here because it takes seconds, in which signals must already be handled.
    from kilolayer.parallel.processes import Processes
    from kilolayer.report.page import write_report
    from kilolayer.runs.begin import data_of, old_run
    from kilolayer.runs.lock import join_launch, was_begun_by_this_launch
    from kilolayer.runs.run import Run, choose_device
    from kilolayer.runs.trackers import make_trackers
    from kilolayer.training import loop

    with ExitStack() as held:
        with Processes.of_environment() as processes:
            again = bool(processes.largest(not resume and was_begun_by_this_launch(folder)))
            with processes.first_process_first():
                if processes.first:
                    opened = held.enter_context(old_run(folder) if again else begin(processes))
                else:
                    opened = Run.open(folder)
                    join_launch(folder)
                task = data_of(opened, processes)
                followed = make_trackers(opened.config.train, trackers) if processes.first and task is not None else []
            held.callback(_finish_without_scores, followed)
            code = 0 if task is None else loop.train(opened, task, resume or again, processes, stop, followed)
        if not code and processes.first:
            if task is not None:  # scored again: scores that exist by now are of earlier weights
                opened.score(task, choose_device(opened.config.train.device))
            scores = opened.scores(opened.config.train.device)
            for tracker in followed:
                tracker.finish(scores)
            show(opened, scores, write_report(opened.folder))
        return code


def _finish_without_scores(trackers: Sequence[Tracker]) -> None:
    """Finish the trackers that received no scores, because training was stopped or failed."""
    for tracker in trackers:
        tracker.finish(None)


def _resume_hint(folder: Path) -> str:
    if (folder / "config.toml").exists():
        return f"continue with: {hints.call('train', resume=folder)}"
    return f"there is nothing to resume yet: the same {'command' if hints.in_shell() else 'call'} starts again"
