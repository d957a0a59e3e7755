"""How far training has moved a model's output from where it began: DeepNet's equation 1, step by step or over checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kilolayer.models.model import Model
from kilolayer.probe.places import top_states
from kilolayer.probe.propagation import Loss
from kilolayer.tasks.task import Batch
from kilolayer.training.schedule import learning_rate
from kilolayer.training.step import Stepper
from kilolayer.training.trainer import Trainer

SHOWN = 10
"""Measurements along the first steps of a training, at most."""


@dataclass(frozen=True)
class Change:
    """||F(x, step) - F(x, 0)|| / ||F(x, 0)||; update_loss: the loss of the step that led there, NaN at a checkpoint."""

    step: int
    size: float
    update_loss: float = float("nan")


def change_over_checkpoints(start: Model, loss: Loss, later: Iterable[tuple[int, Mapping[str, Tensor]]]) -> list[Change]:
    """Of the weights at each step against those of `start`, which has its own again afterwards."""
    output = top_states(loss)
    own = {name: tensor.clone() for name, tensor in start.state_dict().items()}
    before = output(start)
    found = []
    try:
        for step, weights in later:
            start.load_state_dict(weights)
            found.append(Change(step, _relative(output(start), before)))
    finally:
        start.load_state_dict(own)
    return found


def change_over_steps(trainer: Trainer, loss: Loss, steps: int) -> list[Change]:
    """Train on for a few steps, as the run would, and measure the output in between: of its model at most ten times.

    trainer: one that has begun; its model and optimizer are changed.
    """
    output = top_states(loss)
    before = output(trainer.model)
    config, task = trainer.config, trainer.task
    stepper = Stepper(
        trainer.model, trainer.optimizer, config, trainer.guard, trainer.device, _say_nothing, trainer.routing, loss=task.loss
    )
    measured = {round(steps * (place + 1) / SHOWN) for place in range(SHOWN)}
    found = []
    for step in range(1, steps + 1):
        batches: list[Batch] = trainer.take_batches()
        result = stepper.step(batches, learning_rate(config, step))
        if step in measured:
            found.append(Change(step, _relative(output(trainer.model), before), result.nll))
    return found


def _relative(after: Tensor, before: Tensor) -> float:
    return float(torch.linalg.vector_norm((after - before).double()) / torch.linalg.vector_norm(before.double()))


def _say_nothing(_text: str) -> None:
    pass
