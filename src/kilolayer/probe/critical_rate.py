"""The critical learning rate: the smallest step along the optimizer's next update that raises the loss (arXiv:2601.16979)."""

from __future__ import annotations

import math

import torch

from kilolayer.probe.trial import Trial
from kilolayer.tasks.task import Task

SETTLING, QUIET = 20, 1e-4
"""Steps at a small learning rate before it is measured, so that the running gradients are those of several batches."""
SMALLEST, DOUBLINGS, HALVINGS = 1e-5, 28, 3
"""The rates that are tried double from SMALLEST on; the interval in which the loss begins to rise is then halved (in logs)."""


def critical_rate(trial: Trial, task: Task) -> float:
    """Take some quiet steps, then find the smallest rate along the next update at which the loss of its batch rises.

    Infinite if there is none. Without dropout, as all rates must see the same model.
    """
    for _ in range(SETTLING):
        trial.step(QUIET)
    trainer = trial.trainer
    parts = task.on_device(tuple(part.to(trainer.device) for part in next(trainer.batches).parts))
    updates = trainer.optimizer.settled_directions()
    weights = {name: weight for name, weight in trainer.model.named_parameters() if name in updates}
    starts = {name: weight.detach().clone() for name, weight in weights.items()}
    model = trainer.model.eval()

    @torch.no_grad()
    def loss_at(rate: float) -> float:
        for name, weight in weights.items():
            weight.copy_(starts[name] - rate * updates[name].to(weight.device))
        found = task.loss(model, parts, hidden_states=False)
        for name, weight in weights.items():
            weight.copy_(starts[name])
        return float(found.total / found.count)

    start = loss_at(0.0)
    # A loss that is not a number has risen.
    high = next((rate for power in range(DOUBLINGS) if not loss_at(rate := SMALLEST * 2**power) <= start), math.inf)
    low = high / 2
    for _ in range(HALVINGS if math.isfinite(high) else 0):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if loss_at(middle) <= start else (low, middle)
    return high
