"""The learning rate schedule."""

from __future__ import annotations

import math

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
