"""What is probed: a run's model, or the initial model of a configuration, and the loss on the run's own data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kilolayer.errors import InputError
from kilolayer.models.model import Model
from kilolayer.runs.run import Run
from kilolayer.tasks import registry
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.task import Batch, Task
from kilolayer.training.trainer import Trainer


@dataclass(frozen=True)
class BatchLoss:
    """The mean loss per label over a few batches, as a function of the model.

    of: "nll", the negative log-likelihood in nats (for predicted numbers, the squared error), or "total", the training
    objective, with label smoothing and router losses.
    """

    task: Task
    batches: Sequence[Batch]
    of: Literal["nll", "total"] = "nll"

    def __call__(self, model: Model) -> Tensor:
        """The mean loss: fp64 []."""
        sums = [self._sum(model, batch) for batch in self.batches]
        return torch.stack([total for total, _ in sums]).sum() / torch.stack([count for _, count in sums]).sum()

    @torch.no_grad()
    def standard_error(self, model: Model) -> float:
        """The standard error of the mean, from the variation between batches; NaN for a single batch."""
        totals, counts = (torch.stack(each).cpu() for each in zip(*(self._sum(model, b) for b in self.batches), strict=True))
        if len(totals) < 2:
            return math.nan
        apart = totals - counts * (totals.sum() / counts.sum())
        return float((apart.square().sum() * len(totals) / (len(totals) - 1)).sqrt() / counts.sum())

    @property
    def labels(self) -> int:
        """The number of labels."""
        return sum(batch.tokens for batch in self.batches)

    def _sum(self, model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
        device = next(model.parameters()).device
        parts = self.task.on_device(tuple(part.to(device) for part in batch.parts))
        found = self.task.loss(model, parts, hidden_states=False)
        if self.of == "nll":
            return found.nll.double(), found.count
        return (found.total + found.output.router_loss * found.count).double(), found.count


def require_layers(config: RunConfig) -> None:
    """Raise if the model is a task's own, in which no stack of layers is known."""
    if config.own_model is not None:
        raise InputError(
            f"{registry.get(config.task).title} is a model of its task's own, without a known stack of layers to measure",
            where=f"task {config.task}",
            fix="train it, and see its report",
        )


def training_loss(task: Task, seed: int, batches: int, of: Literal["nll", "total"] = "nll") -> BatchLoss:
    """The loss on the first `batches` training batches of a run with this seed."""
    endless = task.training_batches(seed)
    return BatchLoss(task, [next(endless) for _ in range(batches)], of)


def starting_model(config: RunConfig, task: Task, device: torch.device) -> Any:
    """The model before the first training step, in fp32. torch's random state is not changed.

    config: as returned by `task.resolve`.
    """
    train = replace(config.train.unsharded(), device=device.type, threads=0)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        # No file in the folder is read or written: the trainer uses it only for checkpoints.
        trainer = Trainer(Run(Path(), replace(config, train=train)), task)
        trainer.start_weights()
    return trainer.run.runtime.bind(trainer.model.eval())
