"""The training loop: what happens in a run, in order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from kilolayer import hints
from kilolayer.evaluate.stack_label import checks_of, dead_stacks
from kilolayer.models.fit import expected_weights
from kilolayer.parallel.processes import Processes
from kilolayer.runs import checkpoint
from kilolayer.runs.changes import announce_held_out, check_validation, saved_config, state_with
from kilolayer.runs.checkpoint import Checkpoint
from kilolayer.runs.last_saved import deleted
from kilolayer.runs.metrics import Metrics, NullMetrics, read_metrics
from kilolayer.runs.progress import NullProgress, Progress
from kilolayer.runs.retention import Inspector
from kilolayer.runs.run import Run
from kilolayer.runs.saver import Saver
from kilolayer.runs.trackers import Tracker, guarded
from kilolayer.runtime.recorder import Recorder
from kilolayer.tasks.task import Task, Validation
from kilolayer.terminal import counted, plural
from kilolayer.training.norms import LayerNorms
from kilolayer.training.schedule import announce, learning_rate, warmup_warning
from kilolayer.training.stack_health import DyingStackError
from kilolayer.training.step import Stepper, StepResult
from kilolayer.training.stop import STEP_SECONDS, Stop, Stopped, handle_signals
from kilolayer.training.trainer import Trainer, Window


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
        lost = _lost_progress(run, saved) if resume else None
        metrics = NullMetrics()
        if processes.first:
            followed = guarded(trackers)
            for each in followed:
                each.start(run.folder, run.config.table(), trainer.step)
            metrics = Metrics(run.folder, trainer.step, followed, trainer.validated)
        kind = Progress if processes.first else NullProgress
        progress = kind(run.folder / "log.txt", trainer.config.steps, trainer.step)
        _log_start(trainer, progress)
        if processes.first:
            _write_reference(run, task, metrics)
        if lost is not None:
            progress.say(lost)
        if saved is not None:
            _log_changes(trainer, saved, metrics, progress)
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
                _log_dead_stacks(trainer, progress)
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


def _lost_progress(run: Run, saved: Checkpoint | None) -> str | None:
    """The message for a run that cannot be resumed from its last step; None if it can."""
    if saved is None:
        reached = max((row["step"] for row in read_metrics(run.folder)), default=0)
        before = f", though it had reached step {reached:,}" if reached else ""
        return f"there is no complete checkpoint: the run starts from the beginning{before}"
    gone = deleted(run.checkpoints)
    if gone is None or gone <= saved.step:
        return None
    return f"warning: the checkpoint of step {gone:,} has been deleted: the run continues from that of step {saved.step:,}"


def _log_changes(trainer: Trainer, saved: Checkpoint, metrics: Metrics, progress: Progress) -> None:
    """Log the options that have changed since the checkpoint. A run killed before its next checkpoint logs them again."""
    before = saved_config(saved.state)
    options = None if before is None else announce(before, trainer.run.config, saved.step)
    for text in filter(None, (options, announce_held_out(saved.state, trainer.task.held_out(), saved.step))):
        progress.say(text)
        if not any(row.get("change") and row.get("text") == text for row in read_metrics(trainer.run.folder)):
            metrics.write("event", saved.step, change=True, text=text)


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
            _log(trainer, lr, metrics, progress)
        else:
            progress.refresh(step, lambda: _shown(trainer, trainer.window.summary()))
        _validate_and_save(trainer, stepper, metrics, progress, validation, stop, saver)
        saver.check()


def _check_stacks(trainer: Trainer, metrics: Metrics, progress: Progress) -> None:
    """Write how much gradient reaches the first layers of each stack, and say which ones fade; end the run if it is to."""
    step, watch = trainer.step, trainer.watch
    checks = watch.check(step)
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


def _log_dead_stacks(trainer: Trainer, progress: Progress) -> None:
    """Say which stacks are dead at the end of the run."""
    rows = [row for row in read_metrics(trainer.run.folder) if row["kind"] == "stacks"]
    for dead in dead_stacks(checks_of(rows), trainer.config.lr):
        progress.say(dead.text)


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


def _log_start(trainer: Trainer, progress: Progress) -> None:
    size, config, placement = trainer.processes.size, trainer.model.config, trainer.placement
    parts = [config.title, f"{_millions(placement.parameters)} parameters"]
    if config.moe is not None:
        parts[1:] = [config.experts, *parts[1:], f"{_millions(placement.active_parameters)} active"]
    progress.say(f"{', '.join(filter(None, parts))}, on {trainer.device} in {trainer.config.precision}")
    progress.say(trainer.batches.summary)
    if size > 1:
        shared = ", matrices in shards" if placement.mesh is not None else ""
        progress.say(f"{counted(size, 'process')}, {counted(size * trainer.config.accumulate, 'batch')} per step{shared}")
        if trainer.config.shard == "hybrid" and placement.mesh is not None and placement.mesh.ndim == 1:
            progress.say('there is one machine, whose processes share the model as with train.shard = "full"')
    elif trainer.config.shard != "none":
        progress.say("there is one process, which holds the whole model: train.shard has no effect")
    if (warning := warmup_warning(trainer.config)) is not None:
        progress.say(warning)
    if not trainer.task.identifies_held_out:
        progress.say(
            "warning: whether the validation and test sets are the same after a resume cannot be told: the task has no held_out"
        )
    if trainer.step:
        progress.say(f"resumed at step {trainer.step}")


def _millions(count: int) -> str:
    return f"{count / 1e6:.{1 if count >= 1e6 else 2}f} M"


def _log(trainer: Trainer, lr: float, metrics: Metrics, progress: Progress) -> None:
    window, trainer.window = trainer.window, Window()
    summary = window.summary()
    epoch = trainer.batches.epoch + trainer.batches.index / len(trainer.batches)
    metrics.write("train", trainer.step, **summary, lr=lr, epoch=epoch, seconds=trainer.seconds)
    if trainer.routing is not None:
        metrics.write("routing", trainer.step, **window.parts(), **trainer.routing.read())
    progress.update(trainer.step, _shown(trainer, summary), logged=True)


def _shown(trainer: Trainer, summary: dict[str, float]) -> dict[str, str]:
    speed = f"{plural(trainer.run.registration.unit)}/s"
    return {"loss": f"{summary['nll']:.3f}", speed: f"{summary['tokens_per_second']:,.0f}"}


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
            saver.save(replace(state, state=state.state | progress | given), trainer.best.step)
        trainer.saved = trainer.step, scheduled
        trainer.regular = trainer.step if scheduled else trainer.regular
