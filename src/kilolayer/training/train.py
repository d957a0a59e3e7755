"""Training from Python: `kl.train`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from os import PathLike
from typing import TYPE_CHECKING, Any

from kilolayer.errors import OptionError, shown
from kilolayer.files.paths import as_path
from kilolayer.runs.config_source import Source, new_folder, plain_tables, read_source
from kilolayer.terminal import say
from kilolayer.torch_state import own_torch_state
from kilolayer.training.stop import Stopped, resume_hint, stoppable_run

if TYPE_CHECKING:
    from kilolayer.parallel.processes import Processes
    from kilolayer.report.page import Report
    from kilolayer.runs.run import Run
    from kilolayer.runs.trackers import Tracker
    from kilolayer.runs.trained_run import TrainedRun


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

    with own_torch_state("kl.train"), stoppable_run(folder) as stop:
        from kilolayer.training.loop import train_run

        code = train_run(folder, begin, stop, resume=resume is not None, show=_print_report, trackers=trackers)
    if code:
        raise Stopped(code - 128, resume_hint(folder))
    return load(folder, device=Run.open(folder).config.train.device)


def _print_report(run: Run, scores: dict[str, Any], report: Report) -> None:
    for line in (*report.warnings, f"report: {report.path}"):
        say(line)
