"""A few steps of a run in memory, without a run folder: its model, data, optimizer and clipping, at given learning rates."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from kilolayer.evaluate.stack_label import first_layers
from kilolayer.models.model import Model
from kilolayer.runs.run import Run, choose_precision, in_steps
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.task import Task
from kilolayer.training.norms import LayerNorms
from kilolayer.training.step import Stepper
from kilolayer.training.trainer import Trainer


@dataclass(frozen=True)
class Measured:
    """One step: the mean loss per label before it, and the gradient norm; if these are not finite, no update was made.

    stacks: the gradient norm of each layer by stack, from the input on; empty if not requested.
    """

    lr: float
    nll: float
    gradient: float
    stacks: dict[str, tuple[float, ...]]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.nll) and math.isfinite(self.gradient)

    @property
    def reached(self) -> float:
        """The gradient of the weakest stack's first tenth of layers over that of its largest layer; 0 if not finite."""
        largest = max((norm for norms in self.stacks.values() for norm in norms), default=0.0)
        if not (self.finite and largest > 0):
            return 0.0
        return min(map(first_layers, self.stacks.values())) / largest


class Trial:
    """A run in memory, from its first step on."""

    def __init__(self, config: RunConfig, task: Task) -> None:
        """config: as returned by `task.resolve`."""
        config = in_steps(config, task)
        train = config.train.in_steps(0)
        self.config = replace(config, train=replace(train.unsharded(), precision=choose_precision(train)))
        # No file in the folder is read or written: the trainer uses it only for checkpoints.
        self.trainer = Trainer(Run(Path(), self.config), task)
        self.trainer.begin(None)
        trainer = self.trainer
        self.stepper = Stepper(
            trainer.model,
            trainer.optimizer,
            trainer.config,
            trainer.guard,
            trainer.device,
            lambda _: None,
            trainer.routing,
            trainer.processes,
            task.loss,
            trainer.run.runtime,
            task.device_work,
        )

    @property
    def model(self) -> Model:
        """The model after the steps so far."""
        assert isinstance(self.trainer.model, Model)
        return self.trainer.model

    def step(self, lr: float, layers: bool = False) -> Measured:
        """Make one update with this learning rate, unless it is not finite; layers: also measure each layer's gradient."""
        trainer = self.trainer
        trainer.step += 1
        trainer.processes.seed_noise(trainer.config.seed, trainer.step)
        norms = LayerNorms() if layers else None
        result = self.stepper.step(trainer.take_batches(), lr, norms)
        if result.fault is None:
            trainer.guard.accept()
        else:
            trainer.guard.skip(trainer.step, result.fault)
        found = {} if norms is None else {side: tuple(each) for side, each in norms.gradient.items()}
        return Measured(lr, result.nll, result.gradient_norm, found)
