"""The training loop: what happens in a run, in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from kilolayer import hints
from kilolayer.models.fit import expected_weights
from kilolayer.parallel.processes import Processes
from kilolayer.report.page import Report, write_report
from kilolayer.runs import checkpoint
from kilolayer.runs.begin import data_of, old_run
from kilolayer.runs.changes import check_validation, state_with
from kilolayer.runs.lock import join_launch, was_begun_by_this_launch
from kilolayer.runs.metrics import Metrics, NullMetrics, read_metrics
from kilolayer.runs.progress import NullProgress, Progress
from kilolayer.runs.retention import Inspector
from kilolayer.runs.run import Run, choose_device
from kilolayer.runs.saver import Saver
from kilolayer.runs.trackers import Tracker, guarded, make_trackers
from kilolayer.runtime.recorder import Recorder
from kilolayer.tasks.task import Task, Validation
from kilolayer.training.log import log_changes, log_dead_stacks, log_rows, log_start, lost_progress, shown_in_bar
from kilolayer.training.norms import LayerNorms
from kilolayer.training.schedule import learning_rate
from kilolayer.training.stack_health import DyingStackError
from kilolayer.training.step import Stepper, StepResult
from kilolayer.training.stop import STEP_SECONDS, Stop, Stopped, handle_signals
from kilolayer.training.trainer import Trainer

Begin = Callable[[Processes], AbstractContextManager[Run]]
Show = Callable[[Run, dict[str, Any], Report], None]


def train_run(folder: Path, begin: Begin, stop: Stop, *, resume: bool, show: Show, trackers: Sequence[Tracker] = ()) -> int:
    """Train the run in `folder`, score its test set and write its report; return the exit code.

    begin: creates or opens the run and holds its lock; only the first of several processes calls it. resume: whether training
    continues from the last checkpoint; after a restart by torchrun it always does. show: called with the run, the contents of
    scores.json and the report. trackers: in addition to those that the configuration names.
    """
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
            code = 0 if task is None else train(opened, task, resume or again, processes, stop, followed)
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


def train(
    run: Run,
    task: Task,
    resume: bool = False,
    processes: Processes | None = None,
    stop: Stop | None = None,
    trackers: Sequence[Tracker] = (),
) -> int:
    """Train until the last step, until patience runs out, or until a signal; return the exit code.

    Call it in every process; only the first writes files and the log. stop: a signal handler that is already installed. A
    signal that arrives before training has begun raises `Stopped`. trackers: started here and given all metrics; the caller,
    who has the scores, finishes them.
    """
    processes = processes or Processes()
    with (
        handle_signals() if stop is None else nullcontext(stop) as stop,
        stop.waiting_for_step() if processes.size > 1 else nullcontext(),
    ):
        expected = expected_weights(run.config.model)
        inspector = Inspector(expected)
        newest = _newest(run, processes, inspector) if resume else None
        saved = None
        if newest is not None:
            by_rows = run.config.train.shard != "none"
            # Each process of shards reads its rows, and does not hash the rows of all, which the first has done.
            find = inspector.find_fault if processes.first or not by_rows else lambda _: None
            saved = checkpoint.load(newest, find, expected=expected, check=run.check_fit, by_rows=by_rows)
            check_validation(saved.state, task.held_out(), str(run.folder))
        trainer = Trainer(run, task, processes)
        trainer.begin(saved)
        if saved is not None:
            saved = replace(saved, model={}, optimizer={})  # releases the files
        lost = lost_progress(run, saved) if resume else None
        metrics = NullMetrics()
        if processes.first:
            followed = guarded(trackers)
            for each in followed:
                each.start(run.folder, run.config.table(), trainer.step)
            metrics = Metrics(run.folder, trainer.step, followed, trainer.validated)
        kind = Progress if processes.first else NullProgress
        progress = kind(run.folder / "log.txt", trainer.config.steps, trainer.step)
        log_start(trainer, progress)
        if processes.first:
            _write_reference(run, task, metrics)
        if lost is not None:
            progress.say(lost)
        if saved is not None:
            log_changes(trainer, saved, metrics, progress)
        try:
            together = processes if trainer.placement.mesh is not None else None
            with stop.waiting_for_step(), Saver(run.checkpoints, trainer.config.keep, inspector, together) as saver:
                processes.step = trainer.step
                with processes.watchdog(trainer.config.timeout):
                    _loop(trainer, metrics, progress, stop, saver)
                if stop.signal:
                    progress.say(f"stopping: the checkpoint of step {trainer.step} is being written")
                _save(trainer, saver, scheduled=trainer.finished and not trainer.validation_due)
            if trainer.finished and processes.first:
                log_dead_stacks(trainer, progress)
        finally:
            progress.close()
        stopped = processes.largest(stop.signal)
    if stopped:
        again = hints.call("train", resume=run.folder)
        progress.say(f"stopped by a signal at step {trainer.step}; continue with: {again}")
        return 128 + stopped
    return 0


def _write_reference(run: Run, task: Task, metrics: Metrics) -> None:
    """Write, once per run, the reference that losses can be compared with: the loss of predicting token frequencies."""
    known = any(row["kind"] == "reference" for row in read_metrics(run.folder))
    if not known and (loss := task.frequency_loss()) is not None:
        metrics.write("reference", 0, frequency_loss=loss)


def _newest(run: Run, processes: Processes, inspector: Inspector) -> Path | None:
    """The checkpoint to resume from, as found by the first process; None: there is none."""
    found = None
    if processes.first:
        checkpoint.recover(run.checkpoints)
        found = checkpoint.newest(run.checkpoints, inspector.find_fault)
    step = processes.broadcast_number(-1 if found is None else checkpoint.step_of(found))
    return None if step < 0 else checkpoint.path_of(run.checkpoints, int(step))


def _loop(trainer: Trainer, metrics: Metrics, progress: Progress, stop: Stop, saver: Saver) -> None:
    config = trainer.config
    stepper = Stepper(
        trainer.model,
        trainer.optimizer,
        config,
        trainer.guard,
        trainer.device,
        progress.say,
        trainer.routing,
        trainer.processes,
        trainer.task.loss,
        trainer.run.runtime,
        trainer.task.device_work,
    )
    # A validation keeps tables gathered from its first run to its last, and the next one elsewhere in memory.
    validation = Recorder(trainer.device) if trainer.placement.together else stepper.recorder.sharing_pool("validation runs")
    # A validation that was interrupted by a signal before the run was resumed.
    _validate_and_save(trainer, stepper, metrics, progress, validation, stop, saver)
    while trainer.step < config.steps and not trainer.processes.largest(stop.signal):
        if config.patience and trainer.best.waited >= config.patience:
            progress.say(f"stopped at step {trainer.step}: no better validation since step {trainer.best.step}")
            return
        step = trainer.step + 1
        lr = learning_rate(config, step)
        norms = LayerNorms() if config.measures_layers(step) else None
        trainer.processes.step = step
        trainer.processes.seed_noise(config.seed, step)
        started = time.monotonic()
        result = _take_step(trainer, stepper, lr, norms, stop)
        if result is None:
            progress.say(f"step {step} did not end within {STEP_SECONDS:.0f} seconds after the signal: it is abandoned")
            return
        seconds = time.monotonic() - started
        trainer.step = step
        trainer.seconds += seconds
        trainer.window.add(result, seconds)
        if result.fault is None:
            trainer.guard.accept()
            if norms is not None:
                metrics.write("layers", step, **norms.rounded())
            _check_stacks(trainer, metrics, progress)
        else:
            text = trainer.guard.skip(step, result.fault)
            metrics.write("event", step, text=text)
            progress.say(text)
            trainer.guard.check(step)
        if step % config.log_every == 0 or step == config.steps:
            log_rows(trainer, lr, metrics, progress)
        else:
            progress.refresh(step, lambda: shown_in_bar(trainer, trainer.window.summary()))
        _validate_and_save(trainer, stepper, metrics, progress, validation, stop, saver)
        saver.check()


def _check_stacks(trainer: Trainer, metrics: Metrics, progress: Progress) -> None:
    """Write how much gradient reaches the first layers of each stack, and say which ones fade; end the run if it is to."""
    step, watch = trainer.step, trainer.watch
    was_blind, checks = watch.is_blind, watch.check(step)
    if watch.is_blind and not was_blind and trainer.config.stop_when_dead:
        title = trainer.optimizer.rule.title
        progress.say(f"step {step}: train.stop_when_dead has no effect: {title} keeps no running mean of the gradient")
    if not checks:
        return
    metrics.write("stacks", step, **{side: check.row() for side, check in checks.items()})
    for text in watch.take_in(checks):
        metrics.write("event", step, fading=True, text=text)
        progress.say(text)
    if trainer.config.stop_when_dead and (dying := watch.dying(step)):
        ended = DyingStackError(
            f"the first layers of the {' and the '.join(dying)} have had almost no gradient for so long that no run is known "
            "to have recovered, and train.stop_when_dead ends the run",
            where=f"step {step}",
            fix="start a new run with a lower train.lr or more train.warmup_steps, or resume with "
            f"{hints.option('train.stop_when_dead', False)}",
        )
        metrics.write("event", step, ended_by=" and ".join(dying), text=ended.what)
        raise ended


def _take_step(trainer: Trainer, stepper: Stepper, lr: float, norms: LayerNorms | None, stop: Stop) -> StepResult | None:
    """Take the next step; None if a signal interrupted it, in which case everything is as it was before."""
    if trainer.processes.size > 1:  # the other processes would wait for this one
        return stepper.step(trainer.take_batches(), lr, norms)
    position, random = trainer.batches.state(), trainer.random_state()
    try:
        with stop.raising_after_grace_period(lambda: stepper.can_abandon):
            return stepper.step(trainer.take_batches(), lr, norms)
    except Stopped:
        if stop.is_repeated or not stepper.restart():
            raise
        stop.acknowledge()
        trainer.batches.load_state(position)
        trainer.set_random_state(random)
        return None


def _validate_and_save(
    trainer: Trainer, stepper: Stepper, metrics: Metrics, progress: Progress, recorder: Recorder, stop: Stop, saver: Saver
) -> None:
    """Validate and save if the last step calls for it. A signal ends the validation, and a resumed run starts with it."""
    improved = False
    if trainer.validation_due:
        random = trainer.random_state()
        try:
            improved = _validate(trainer, stepper, metrics, progress, recorder, stop)
        except Stopped:
            if stop.is_repeated:
                raise
            stop.acknowledge()
            trainer.set_random_state(random)
            progress.say(f"step {trainer.step}: the validation was interrupted by a signal; a resumed run starts with it")
            return
    if (improved and trainer.config.save_best) or (trainer.step and trainer.config.saves(trainer.step)):
        _save(trainer, saver)


def _validate(trainer: Trainer, stepper: Stepper, metrics: Metrics, progress: Progress, recorder: Recorder, stop: Stop) -> bool:
    """Validate and log the result; return whether it is the best so far."""
    measured = _measure(trainer, stepper, recorder, stop)
    trainer.validated = trainer.step
    if measured is None:
        return False
    metrics.write("valid", trainer.step, **measured.metrics())
    progress.say(f"step {trainer.step}: validation {measured}")
    return trainer.best.update(trainer.processes.broadcast_number(measured.quality), trainer.step)


def _measure(trainer: Trainer, stepper: Stepper, recorder: Recorder, stop: Stop) -> Validation | None:
    """Run the task's validation. A signal to one of several processes raises `Stopped` on all of them.

    The processes exchange their signals before each run of the recorder and once at the end. A process that a signal interrupts
    between two exchanges takes part in one more, which is the next one of the others. Processes that share experts or matrices
    always run in step.
    """
    processes, together = trainer.processes, trainer.placement.together
    agreed = False

    def raise_if_stopped() -> None:
        nonlocal agreed
        with stop.waiting_for_step():  # otherwise the agreement would be lost
            number = processes.largest(stop.signal)
            agreed = number > 0
        if agreed or (stop.signal and not together):
            raise Stopped(number or stop.signal)

    recorder.before_run = raise_if_stopped if processes.size > 1 else None
    try:
        with trainer.placement.callable_in_parts(), nullcontext() if together else stop.raising_at_once():
            measured = trainer.task.validate(stepper.form, trainer.config.valid_sentences, recorder)
    except Stopped:
        if not agreed:
            processes.largest(stop.signal)
        raise
    if processes.size > 1 and (number := processes.largest(stop.signal)):
        raise Stopped(number)
    return measured


def _save(trainer: Trainer, saver: Saver, scheduled: bool = True) -> None:
    """Start writing a checkpoint, unless this step already has one.

    scheduled: whether the checkpoint is on the run's schedule. A stopped run leaves an extra one, used only to resume from.
    """
    if trainer.saved not in ((trainer.step, True), (trainer.step, scheduled)):
        state = trainer.state()
        if trainer.processes.first or trainer.placement.mesh is not None:
            progress = {"scheduled": scheduled, "regular_before": trainer.regular}
            given = state_with(trainer.run.config, trainer.task.held_out())
            best = trainer.best.step if trainer.config.save_best else None
            saver.save(replace(state, state=state.state | progress | given), best)
        trainer.saved = trainer.step, scheduled
        trainer.regular = trainer.step if scheduled else trainer.regular
