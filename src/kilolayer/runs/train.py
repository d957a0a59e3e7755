"""Training from a configuration to a scored run with its report: the one way that the command and Python go."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kilolayer.parallel.parent import when_parent_dies
from kilolayer.terminal import say, speaks, under_torchrun
from kilolayer.training.stop import Stop, Stopped, catching

if TYPE_CHECKING:
    from kilolayer.parallel.processes import Processes
    from kilolayer.report.page import Report
    from kilolayer.training.run import Run
    from kilolayer.training.trackers import Tracker

Begin = Callable[["Processes"], AbstractContextManager["Run"]]
Show = Callable[["Run", dict[str, Any], "Report"], None]


def train_run(folder: Path, begin: Begin, *, resume: bool, show: Show, trackers: Sequence[Tracker] = ()) -> int:
    """Train the run in `folder`, score its test part and write its report; return the exit code.

    begin: makes or opens the run and holds it; of several processes the first calls it, and ends the run. resume: whether
    training goes on from the last checkpoint. show: is given the run, what scores.json holds and the report.
    trackers: besides those that the configuration names.
    """
    with catching() as stop:
        if under_torchrun():
            when_parent_dies(os.getppid(), stop.orphaned)
        try:
            with stop.at_once():
                return _train(folder, begin, resume, show, stop, trackers)
        except Stopped as ended:
            stop.heed()
            if speaks():
                say(_how_to_go_on(folder))
            return 128 + ended.number


def _train(folder: Path, begin: Begin, resume: bool, show: Show, stop: Stop, trackers: Sequence[Tracker]) -> int:
    # Imported here: seconds in which signals are handled already.
    from kilolayer.parallel.processes import Processes
    from kilolayer.report.page import write_report
    from kilolayer.runs.begin import data_of
    from kilolayer.training import loop
    from kilolayer.training.run import Run
    from kilolayer.training.trackers import make_trackers

    with ExitStack() as held:
        with Processes.of_environment() as processes:
            with processes.in_turn():
                opened = held.enter_context(begin(processes)) if processes.first else Run.open(folder)
                task = data_of(opened, processes)
                followed = make_trackers(opened.config.train, trackers) if processes.first and task is not None else []
            held.callback(_leave, followed)
            code = 0 if task is None else loop.train(opened, task, resume, processes, stop, followed)
        if not code and processes.first:
            # Once: what was scored before is read.
            scores = opened.scores(opened.config.train.device)
            for tracker in followed:
                tracker.finish(scores)
            show(opened, scores, write_report(opened.folder))
        return code


def _leave(trackers: Sequence[Tracker]) -> None:
    """Finish those that no scores have come to: training was stopped, or has failed."""
    for tracker in trackers:
        tracker.finish(None)


def _how_to_go_on(folder: Path) -> str:
    if (folder / "config.toml").exists():
        return f"stopped by a signal; go on with: kilolayer train --resume {folder}"
    return "stopped by a signal: nothing was begun that could be resumed; the same command starts anew"
