"""The first steps of training, one by one, with measurements of the model in between."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kilolayer.config import Table, build, merge
from kilolayer.models.model import Model
from kilolayer.probe.hooks import top_states
from kilolayer.probe.subject import BatchLoss, training_loss
from kilolayer.probe.trial import Measured, Trial
from kilolayer.runs.run import cache_folder, prepare
from kilolayer.tasks.config import RunConfig
from kilolayer.training.schedule import learning_rate


class EarlyTraining:
    """A run before its first step, in fp32; its model is measured on the first training batch."""

    def __init__(self, table: Table) -> None:
        config = build(RunConfig, merge(table, {"train": {"precision": "fp32"}}))
        task = prepare(config, cache_folder())
        self.trial = Trial(task.resolve(config), task)
        self.loss = training_loss(task, config.train.seed, 1)
        self.taken = 0

    @property
    def model(self) -> Model:
        """The model after the steps so far."""
        return self.trial.model

    def later_batches(self, count: int) -> BatchLoss:
        """The loss on the next batches, which training has not seen."""
        trainer: Any = self.trial.trainer
        return BatchLoss(trainer.task, [next(trainer.batches) for _ in range(count)])

    def step(self) -> Measured:
        """Take one step at the scheduled learning rate; return its loss and the gradient of each layer."""
        self.taken += 1
        return self.trial.step(learning_rate(self.trial.config.train, self.taken), layers=True)

    def output(self) -> Tensor:
        """F(x): the final states of the model at real positions, without dropout: fp64 [positions, dim]."""
        return top_states(self.loss)(self.model).double()


def model_update(before: Tensor, after: Tensor) -> float:
    """||F(x, after) - F(x, before)|| / sqrt(positions): equation 1 of DeepNet, averaged over positions."""
    return float((after - before).norm() / after.shape[0] ** 0.5)
