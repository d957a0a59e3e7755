"""Checks during training whether the first layers of each stack still learn, from the optimizer's running gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from kilolayer.errors import KilolayerError
from kilolayer.evaluate.stack_label import DYING, SHARE, Fading, StackCheck, as_fraction, first_layers
from kilolayer.models.trainable import Trainable
from kilolayer.optimizers.optimizer import Optimizer
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training.norms import columns_of

LEAST_UPDATES, LEAST_DISTANCE = 10, 10
"""Updates before the running gradients are meaningful, and the minimum number of steps between two checks."""


class DyingStackError(KilolayerError):
    """A stack will not recover, as far as any run has shown, and the run was configured to stop in that case."""


class StackWatch:
    """Checks the stacks of a run a hundred times, at least ten steps apart.

    fading: how far each has faded. is_blind: whether the optimizer turned out to keep no running gradients.
    """

    def __init__(self, model: Trainable, optimizer: Optimizer, config: TrainConfig) -> None:
        self.optimizer, self.config = optimizer, config
        self.depths = {stack.side: len(stack.blocks) for stack in model.stacks()}
        self.columns = columns_of(model, optimizer)
        self.every = max(LEAST_DISTANCE, config.steps // 100)
        self.fading = {side: Fading() for side in self.depths}
        self.is_blind = False

    def check(self, step: int) -> dict[str, StackCheck]:
        """The checks of this step, by stack; empty if none is due. Must be called on all processes."""
        return {} if step % self.every and step != self.config.steps else self.measure(step)

    def take_in(self, checks: Mapping[str, StackCheck]) -> list[str]:
        """Take in the checks of a step; returns what to log: each stack that is below a level, or hidden by eps, for the first
        time."""
        lines = []
        for side, check in checks.items():
            fading = self.fading[side]
            if (level := fading.add(check)) is not None:
                seen = f"the gradient of the {side}'s first layers is {as_fraction(check.reached)} of the largest layer's"
                lines.append(f"step {check.step}: {seen}. {level.text}")
            if not fading.hidden and check.is_hidden(self.config.lr):
                fading.hidden = True
                moved = f"a step moves the {side}'s first layers by {check.moved:.1e} of the learning rate"
                lines.append(f"step {check.step}: {moved}: train.eps hides their gradient, and a smaller one would not")
        return lines

    def dying(self, step: int) -> list[str]:
        """The stacks that will be dead at the end of the run, as far as any run has shown."""
        return [side for side, fading in self.fading.items() if fading.is_dying(step, self.config.steps)]

    def state(self) -> dict[str, dict[str, Any]]:
        return {side: asdict(fading) for side, fading in self.fading.items()}

    def load_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        self.fading = {side: Fading(**values) for side, values in state.items()}

    def form(self) -> dict[str, Any]:
        """The types of the values in `state`."""
        form = {"level": int, "since": [int | None] * len(DYING), "checks": [int] * len(DYING), "hidden": bool}
        return dict.fromkeys(self.fading, form)

    @torch.no_grad()
    def measure(self, step: int) -> dict[str, StackCheck]:
        """A check of each stack from the running gradients; empty before these are meaningful, or without any."""
        if not self.depths or int(self.optimizer.taken) < LEAST_UPDATES:
            return {}
        health = self.optimizer.health()
        self.is_blind = health is None
        if health is None:
            return {}
        layers = sum(self.depths.values())
        squares, moves = (torch.zeros(layers + 1, dtype=torch.float64, device=self.optimizer.device) for _ in range(2))
        for group, columns, (norms, changes) in zip(self.optimizer.groups, self.columns, health, strict=True):
            squares.index_add_(0, columns, norms.square())
            moves.scatter_reduce_(0, columns, changes / self.optimizer.size_of_all(group).sqrt(), "amax")
        gradients, moved, lr = squares.sqrt().tolist()[:layers], moves.tolist(), float(self.optimizer.lr)
        largest = max(gradients)
        checks, start = {}, 0
        for side, depth in self.depths.items():
            first = slice(start, start + max(1, round(SHARE * depth)))
            reached = first_layers(gradients[start : start + depth]) / largest if largest else 0.0
            checks[side] = StackCheck(step, reached, max(moved[first]) / lr if lr else math.nan)
            start += depth
        return checks
