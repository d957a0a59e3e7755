"""The learning rate schedule, and how it changes with the options of a resumed run."""

from __future__ import annotations

import math

from kilolayer.runs.changes import SCHEDULE, changes_between
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.train_config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of `step`, counted from 1: a linear warm-up, then the schedule."""
    warmup = config.warmup_steps
    if step <= warmup:
        return config.lr * step / warmup
    after, length = step - warmup, max(1, config.steps - warmup)
    fall = config.lr - config.min_lr
    match config.schedule:
        case "inverse_sqrt":
            return config.lr * math.sqrt(max(1, warmup) / step)
        case "cosine":
            return config.min_lr + fall * 0.5 * (1 + math.cos(math.pi * min(1.0, after / length)))
        case "linear":
            return config.lr - fall * min(1.0, after / length)
        case "warmup_stable_decay":
            decayed = max(0, step - (config.steps - config.decay_steps))
            return config.lr - fall * min(1.0, decayed / config.decay_steps)
        case "constant":
            return config.lr


def warmup_warning(config: TrainConfig) -> str | None:
    """The warning for a warm-up that is as long as the run or longer; None if it is shorter, or a length is still in epochs."""
    warmup, steps = config.warmup_steps, config.steps
    if config.epochs is not None or config.warmup_share is not None or warmup < steps:
        return None
    falls = config.schedule != "constant"
    if warmup == steps:
        return f"warning: the warm-up takes all {steps:,} steps: the {config.schedule} decay never starts" if falls else None
    return (
        f"warning: the warm-up of {warmup:,} steps is longer than the run of {steps:,}: the learning rate ends at "
        f"{learning_rate(config, steps):.3g} and never reaches train.lr, {config.lr:g}; lower train.warmup_steps"
    )


def announce(before: RunConfig, now: RunConfig, step: int) -> str | None:
    """A message on what the run does differently after `step`, and how its learning rate changes; None if nothing changed."""
    changes = changes_between(before, now)
    if not changes:
        return None
    said = f"from step {step + 1:,} on, {'; '.join(map(str, changes))}"
    if any(change.path in SCHEDULE for change in changes) and step < now.train.steps:
        said += f"; {_rates(before.train, now.train, step + 1)}"
    return said


def _rates(before: TrainConfig, now: TrainConfig, step: int) -> str:
    old, new = (learning_rate(each, step) for each in (before, now))
    if old == new:
        return f"the learning rate stays what it would have been, {new:.3g} at step {step:,}"
    return f"the learning rate of step {step:,} is {new:.3g} ({now.schedule} over {now.steps:,} steps), instead of {old:.3g}"
