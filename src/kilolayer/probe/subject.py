"""What is probed: the model of a run, or the one that a configuration would start with, and the loss on its own data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kilolayer.models.build import build_model
from kilolayer.models.calibrate import calibrate
from kilolayer.models.model import Model
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.task import Batch, Task
from kilolayer.training.run import Run, load_weights


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
    """The model before its first step, as training would have it: a recipe that needs data is calibrated.

    config: as `task.resolve` gives it.
    """
    train = config.train
    model = build_model(config.model, device=device, seed=train.seed)
    if train.start_from is not None:
        other = Run.open(Path(train.start_from))
        load_weights(model, task.adopt(other.weights(task.vocabulary), model.state_dict()), other.folder)
    elif config.model.recipe.calibration() is not None:
        inputs = task.model_inputs(next(task.training_batches(train.seed)).parts)
        named = {name: each.to(device) for name, each in inputs.items()} if isinstance(inputs, Mapping) else None
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(train.seed)  # the dropout of the profiling pass
            calibrate(model, named or [each.to(device) for each in inputs if isinstance(each, Tensor)])
    return model.eval()
