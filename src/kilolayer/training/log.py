"""What a run says in its log while it is trained, and writes into its metrics beside it."""

from __future__ import annotations

from kilolayer.evaluate.stack_label import checks_of, dead_stacks
from kilolayer.runs.changes import announce_held_out, saved_config
from kilolayer.runs.checkpoint import Checkpoint
from kilolayer.runs.last_saved import deleted
from kilolayer.runs.metrics import Metrics, read_metrics
from kilolayer.runs.progress import Progress
from kilolayer.runs.run import Run
from kilolayer.terminal import counted, plural
from kilolayer.training.schedule import announce, warmup_warning
from kilolayer.training.trainer import Trainer, Window


def log_start(trainer: Trainer, progress: Progress) -> None:
    """Log the model, the data and the processes, and what about them is worth a warning."""
    size, config, placement = trainer.processes.size, trainer.model.config, trainer.placement
    parts = [config.title, f"{_millions(placement.parameters)} parameters"]
    if config.moe is not None:
        parts[1:] = [config.experts, *parts[1:], f"{_millions(placement.active_parameters)} active"]
    progress.say(f"{', '.join(filter(None, parts))}, on {trainer.device} in {trainer.config.precision}")
    for text in (trainer.batches.summary, *trainer.task.notes):
        progress.say(text)
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


def lost_progress(run: Run, saved: Checkpoint | None) -> str | None:
    """The message for a run that cannot be resumed from its last step; None if it can."""
    if saved is None:
        reached = max((row["step"] for row in read_metrics(run.folder)), default=0)
        before = f", though it had reached step {reached:,}" if reached else ""
        return f"there is no complete checkpoint: the run starts from the beginning{before}"
    gone = deleted(run.checkpoints)
    if gone is None or gone <= saved.step:
        return None
    return f"warning: the checkpoint of step {gone:,} has been deleted: the run continues from that of step {saved.step:,}"


def log_changes(trainer: Trainer, saved: Checkpoint, metrics: Metrics, progress: Progress) -> None:
    """Log the options that have changed since the checkpoint. A run killed before its next checkpoint logs them again."""
    before = saved_config(saved.state)
    options = None if before is None else announce(before, trainer.run.config, saved.step)
    for text in filter(None, (options, announce_held_out(saved.state, trainer.task.held_out(), saved.step))):
        progress.say(text)
        if not any(row.get("change") and row.get("text") == text for row in read_metrics(trainer.run.folder)):
            metrics.write("event", saved.step, change=True, text=text)


def log_dead_stacks(trainer: Trainer, progress: Progress) -> None:
    """Say which stacks are dead at the end of the run."""
    rows = [row for row in read_metrics(trainer.run.folder) if row["kind"] == "stacks"]
    for dead in dead_stacks(checks_of(rows), trainer.config.lr):
        progress.say(dead.text)


def log_rows(trainer: Trainer, lr: float, metrics: Metrics, progress: Progress) -> None:
    """Write the rows of metrics since the last ones, and show the newest values."""
    window, trainer.window = trainer.window, Window()
    summary = window.summary()
    epoch = trainer.batches.epoch + trainer.batches.index / len(trainer.batches)
    metrics.write("train", trainer.step, **summary, lr=lr, epoch=epoch, seconds=trainer.seconds)
    if trainer.routing is not None:
        metrics.write("routing", trainer.step, **window.parts(), **trainer.routing.read())
    progress.update(trainer.step, shown_in_bar(trainer, summary), logged=True)


def shown_in_bar(trainer: Trainer, summary: dict[str, float]) -> dict[str, str]:
    """The values beside the bar of progress."""
    speed = f"{plural(trainer.run.registration.unit)}/s"
    return {"loss": f"{summary['nll']:.3f}", speed: f"{summary['tokens_per_second']:,.0f}"}


def _millions(count: int) -> str:
    return f"{count / 1e6:.{1 if count >= 1e6 else 2}f} M"
