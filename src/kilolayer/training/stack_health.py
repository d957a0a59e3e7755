"""Checks during training whether the first layers of each stack still learn, from the optimizer's moments."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from kilolayer.errors import KilolayerError
from kilolayer.models.model import Model
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training.norms import columns_of
from kilolayer.training.optimizer import AT_ONCE, Group, Optimizer
from kilolayer.training.stack_label import DYING, SHARE, Fading, StackCheck, as_fraction, first_layers

LEAST_UPDATES, LEAST_DISTANCE = 10, 10
"""Updates before the moments are meaningful, and the minimum number of steps between two checks."""


class DyingStackError(KilolayerError):
    """A stack will not recover, as far as any run has shown, and the run was configured to stop in that case."""


class StackWatch:
    """Checks the stacks of a run a hundred times, at least ten steps apart. fading: how far each has faded."""

    def __init__(self, model: Model, optimizer: Optimizer, config: TrainConfig) -> None:
        self.optimizer, self.config = optimizer, config
        self.depths = {stack.side: len(stack.blocks) for stack in model.stacks()}
        self.columns = columns_of(model, optimizer)
        self.every = max(LEAST_DISTANCE, config.steps // 100)
        self.fading = {side: Fading() for side in self.depths}

    def check(self, step: int) -> dict[str, StackCheck]:
        """The checks of this step, by stack; empty if none is due. Must be called on all processes."""
        return {} if step % self.every and step != self.config.steps else self.measure(step)

    def take_in(self, checks: Mapping[str, StackCheck]) -> list[str]:
        """Take in the checks of a step; returns what to log: each stack that is below a level, or hidden by eps, for the first
        time."""
        found = []
        for side, check in checks.items():
            fading = self.fading[side]
            if (level := fading.add(check)) is not None:
                seen = f"the gradient of the {side}'s first layers is {as_fraction(check.reached)} of the largest layer's"
                found.append(f"step {check.step}: {seen}. {level.text}")
            if not fading.hidden and check.is_hidden(self.config.lr):
                fading.hidden = True
                moved = f"a step moves the {side}'s first layers by {check.moved:.1e} of the learning rate"
                found.append(f"step {check.step}: {moved}: train.eps hides their gradient, and a smaller one would not")
        return found

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
        """A check of each stack from the moments; empty before these are meaningful."""
        taken = int(self.optimizer.taken)
        if taken < LEAST_UPDATES:
            return {}
        layers = sum(self.depths.values())
        squares, moves = (torch.zeros(layers + 1, dtype=torch.float64, device=self.optimizer.device) for _ in range(2))
        factors = self.optimizer.coefficients(torch.ones_like(self.optimizer.lr), self.optimizer.taken).tolist()
        for group, columns in zip(self.optimizer.groups, self.columns, strict=True):
            parts = [self._norms(group, start, taken, factors) for start in range(0, len(group.weights), AT_ONCE)]
            means, changes = (self.optimizer.of_all(group, torch.cat(each)).double() for each in zip(*parts, strict=True))
            squares.index_add_(0, columns, means.square())
            moves.scatter_reduce_(0, columns, changes / self._sizes(group).sqrt(), "amax")
        gradients, moved, lr = squares.sqrt().tolist()[:layers], moves.tolist(), factors[0]
        largest = max(gradients)
        found, start = {}, 0
        for side, depth in self.depths.items():
            first = slice(start, start + max(1, round(SHARE * depth)))
            reached = first_layers(gradients[start : start + depth]) / largest if largest else 0.0
            found[side] = StackCheck(step, reached, max(moved[first]) / lr if lr else math.nan)
            start += depth
        return found

    def _sizes(self, group: Group) -> Tensor:
        """The number of elements of each weight of a group, over all processes that share it: fp64 [weights of the group]."""
        shares = 1 if self.optimizer.sharing is None or not group.of_experts else self.optimizer.sharing.size
        sizes = [weight.numel() * shares for weight in group.weights]
        return torch.tensor(sizes, dtype=torch.float64, device=self.optimizer.device)

    def _norms(self, group: Group, start: int, taken: int, factors: list[float]) -> tuple[Tensor, Tensor]:
        """For a few weights: the norms of their running gradients, and of the change in the last update."""
        few = slice(start, start + AT_ONCE)
        _, step, root, offset, _ = factors
        offset *= group.eps if root else 1.0
        means, seen = group.means[few], 1 - self.config.beta1**taken
        if group.decay and not self.config.decoupled:
            # The mean also contains decay * w. Weights change slowly, so that this part is about decay * w * (1 - beta1^t).
            weights = [weight.detach().to(means[0].dtype) for weight in (group.masters or list(group.weights))[few]]
            means = torch._foreach_sub(means, torch._foreach_mul(weights, group.decay * seen))
        roots = torch._foreach_sqrt(group.squares[few])
        torch._foreach_mul_(roots, root)
        torch._foreach_add_(roots, offset)
        norms = torch.stack(torch._foreach_norm(means, 2)) / seen
        return norms, torch.stack(torch._foreach_norm(torch._foreach_div(means, roots), 2)) * step
