"""What is probed: the model of a run, or the one that a configuration would start with, and the loss on its own data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kilolayer.models.model import Model
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.task import Batch, Task
from kilolayer.training.run import Run
from kilolayer.training.trainer import Trainer


@dataclass(frozen=True)
class BatchLoss:
    """The mean loss of a label over a few batches: what the probes call with a model.

    of: "nll", the negative log-likelihood in nats (of numbers, the squared error), or "total", what training minimises:
    smoothed, and with the loss of the routers.
    """

    task: Task
    batches: Sequence[Batch]
    of: Literal["nll", "total"] = "nll"

    def __call__(self, model: Model) -> Tensor:
        """[], in fp64."""
        sums = [self._sum(model, batch) for batch in self.batches]
        return torch.stack([total for total, _ in sums]).sum() / torch.stack([count for _, count in sums]).sum()

    @torch.no_grad()
    def standard_error(self, model: Model) -> float:
        """Of the mean, from how the batches differ; NaN of a single one."""
        totals, counts = (torch.stack(each).cpu() for each in zip(*(self._sum(model, b) for b in self.batches), strict=True))
        if len(totals) < 2:
            return math.nan
        apart = totals - counts * (totals.sum() / counts.sum())
        return float((apart.square().sum() * len(totals) / (len(totals) - 1)).sqrt() / counts.sum())

    @property
    def labels(self) -> int:
        """How many it is the mean of."""
        return sum(batch.tokens for batch in self.batches)

    def _sum(self, model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
        device = next(model.parameters()).device
        found = self.task.loss(model, [part.to(device) for part in batch.parts], hidden_states=False)
        if self.of == "nll":
            return found.nll.double(), found.count
        return (found.total + found.output.router_loss * found.count).double(), found.count


def training_loss(task: Task, seed: int, batches: int, of: Literal["nll", "total"] = "nll") -> BatchLoss:
    """On the first `batches` batches that a run with this seed trains on."""
    endless = task.training_batches(seed)
    return BatchLoss(task, [next(endless) for _ in range(batches)], of)


def starting_model(config: RunConfig, task: Task, device: torch.device) -> Model:
    """The model before its first step, in fp32, as training would have it. torch's random state is left as it was.

    config: as `task.resolve` gives it.
    """
    train = replace(config.train, device=device.type, threads=0)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        # No file of the folder is read or written: the trainer asks it for checkpoints alone.
        trainer = Trainer(Run(Path(), replace(config, train=train)), task)
        trainer.start_weights()
    return trainer.model.eval()
