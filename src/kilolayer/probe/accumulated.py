"""The accumulated model update, DeepNet's equation 1: how far training has moved a model's output from its initial value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kilolayer.models.model import Model
from kilolayer.probe.hooks import top_states
from kilolayer.probe.propagation import Loss
from kilolayer.probe.trial import Trial
from kilolayer.training.schedule import learning_rate

SHOWN = 10
"""Maximum number of measurements during the first steps of training."""


@dataclass(frozen=True)
class Change:
    """||F(x, step) - F(x, 0)|| / ||F(x, 0)||; update_loss: the loss of the last step before it, NaN for a checkpoint."""

    step: int
    size: float
    update_loss: float = float("nan")


def change_over_checkpoints(start: Model, loss: Loss, later: Iterable[tuple[int, Mapping[str, Tensor]]]) -> list[Change]:
    """Compare the output with later weights to that of `start`, whose own weights are restored afterwards."""
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


def change_over_steps(trial: Trial, loss: Loss, steps: int) -> list[Change]:
    """Take the first steps of a run, with its learning-rate schedule, and measure the output at most ten times."""
    output = top_states(loss)
    before = output(trial.model)
    measured = {round(steps * (index + 1) / SHOWN) for index in range(SHOWN)}
    found = []
    for step in range(1, steps + 1):
        result = trial.step(learning_rate(trial.config.train, step))
        if step in measured:
            found.append(Change(step, _relative(output(trial.model), before), result.nll))
    return found


def _relative(after: Tensor, before: Tensor) -> float:
    return float(torch.linalg.vector_norm((after - before).double()) / torch.linalg.vector_norm(before.double()))
