"""Detects stacks whose first layers have stopped learning, from the optimizer's moments and without changing any step."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kilolayer.errors import KilolayerError
from kilolayer.models.model import Model
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training.norms import LayerNorms, columns_of
from kilolayer.training.optimizer import AT_ONCE, Group, Optimizer

REACHED = 1e-3
"""The smallest healthy gradient of the first layers, as a fraction of the largest layer's gradient.

Below it twice in a row, and not rising, the first layers are dead. Runs that died (benchmarks/translation/warmup.json,
thousand-*.json) had 7e-4 or less and did not recover; runs that lived stayed above 4e-3. An encoder behind branches that start
at zero (ReZero, R-Fixup) begins below it, and cannot be dead before it has once been above.
"""
MOVED, LEAST_MOVE = 1e-3, 1e-6
"""As a fraction of Adam's usual step, and times the peak learning rate: below both, eps dominates and no weight moves."""
SHARE = 0.1
"""The fraction of a stack's layers that count as its first layers."""
LEAST_UPDATES, LEAST_DISTANCE = 10, 10
"""Updates before the moments are meaningful, and the minimum number of steps between two checks."""


class DeadStackError(KilolayerError):
    """A stack no longer learns, and the run was configured to stop in that case."""


def first_layers(norms: Sequence[float], share: float = SHARE) -> float:
    """The mean over the first `share` of a stack's layers, at least one layer."""
    count = max(1, round(share * len(norms)))
    return sum(norms[:count]) / count


@dataclass(frozen=True)
class StackPulse:
    """How much gradient still reaches the first layers of a stack.

    first: mean norm of their running gradients. largest: that of the layer with the largest one in the model. moved: the
    largest step of any weight in them, where 1 is Adam's usual step.
    """

    side: str
    first: float
    largest: float
    moved: float

    @property
    def reached(self) -> float:
        """The gradient of the first layers as a fraction of the largest layer's."""
        return self.first / self.largest if self.largest else 0.0

    def fault(self, lr: float, before: float | None) -> str | None:
        """Why the stack is dead, for a message; None if it is not.

        lr: the run's peak learning rate. before: `reached` at the previous check.
        """
        if self.moved < MOVED and self.moved * lr < LEAST_MOVE:
            return f"a step moves its first layers by {self.moved:.1e} of the learning rate: train.eps hides their gradient"
        if before is not None and self.reached <= before < REACHED:
            return (
                f"the gradient of its first layers is {self.reached:.1e} of the largest layer's "
                f"({self.first:.1e} of {self.largest:.1e})"
            )
        return None


class StackWatch:
    """Checks from time to time whether the stacks of a run still learn, and reports each dead stack once.

    found_dead: for each dead stack, the step at which it was found. before: for each stack, `reached` at the previous check;
    None if there was none, or if branches that start at zero have not opened yet.
    """

    def __init__(self, model: Model, optimizer: Optimizer, config: TrainConfig) -> None:
        self.optimizer, self.config = optimizer, config
        self.depths = {stack.side: len(stack.blocks) for stack in model.stacks()}
        self.found_dead: dict[str, int | None] = dict.fromkeys(self.depths)
        self.before: dict[str, float | None] = dict.fromkeys(self.depths)
        self.zero_branches = model.config.recipe.zero_branches
        self.columns = columns_of(model, optimizer)
        self.every = config.log_every * -(-LEAST_DISTANCE // config.log_every)
        # A measured gradient is that of one step, the moments hold the mean of several; the two are not mixed.
        self.reads_norms = config.layers_distance > 0 and self.every % config.layers_distance == 0

    def find_dead(self, step: int, lr: float, norms: LayerNorms | None = None) -> dict[str, str]:
        """The stacks found dead for the first time after this step, each with the message to log.

        lr: the step's learning rate. norms: what the step measured. Checks when metrics are written, at least ten steps apart;
        must be called on all processes.
        """
        if step % self.every or not lr or None not in self.found_dead.values():
            return {}
        found: dict[str, str] = {}
        for pulse in self.measure(lr, norms if self.reads_norms else None):
            fault = pulse.fault(self.config.lr, self.before[pulse.side])
            if self.found_dead[pulse.side] is None and fault is not None:
                self.found_dead[pulse.side] = step
                found[pulse.side] = f"step {step}: the {pulse.side} is dead: {fault}; {self._remedy(pulse)}"
            if not self.zero_branches or self.before[pulse.side] is not None or pulse.reached >= REACHED:
                self.before[pulse.side] = pulse.reached
        return found

    def check(self, step: int) -> None:
        """Raise if a stack is dead."""
        if dead := [side for side, found in self.found_dead.items() if found is not None]:
            raise DeadStackError(
                f"the {' and the '.join(dead)} no longer learn{'s' * (len(dead) == 1)}, and train.stop_when_dead ends the run",
                where=f"step {step}",
                fix="start a new run as the log advises, or resume with --train.stop_when_dead false",
            )

    def state(self) -> dict[str, dict[str, float | int | None]]:
        return {"told": dict(self.found_dead), "before": dict(self.before)}

    def load_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        self.found_dead, self.before = dict(state["told"]), dict(state["before"])

    def form(self) -> dict[str, Any]:
        """The types of the values in `state`."""
        return {"told": dict.fromkeys(self.found_dead, int | None), "before": dict.fromkeys(self.found_dead, float | None)}

    @torch.no_grad()
    def measure(self, lr: float, norms: LayerNorms | None = None) -> list[StackPulse]:
        """The pulse of each stack, from the moments or the gradients in `norms`; empty before the moments are meaningful."""
        taken = int(self.optimizer.taken)
        if taken < LEAST_UPDATES:
            return []
        layers = sum(self.depths.values())
        squares, moves = (torch.zeros(layers + 1, dtype=torch.float64, device=self.optimizer.device) for _ in range(2))
        factors = self.optimizer.coefficients(torch.ones_like(self.optimizer.lr), self.optimizer.taken).tolist()
        for group, columns in zip(self.optimizer.groups, self.columns, strict=True):
            parts = [self._norms(group, start, taken, factors) for start in range(0, len(group.weights), AT_ONCE)]
            means, changes = (self.optimizer.of_all(group, torch.cat(each)).double() for each in zip(*parts, strict=True))
            squares.index_add_(0, columns, means.square())
            moves.scatter_reduce_(0, columns, changes / (self._sizes(group).sqrt() * lr), "amax")
        gradients, moved = squares.sqrt().tolist()[:layers], moves.tolist()
        if norms is not None:
            gradients = [norm for side in self.depths for norm in norms.gradient[side]]
        pulses, start = [], 0
        for side, depth in self.depths.items():
            own = gradients[start : start + depth]
            first = slice(start, start + max(1, round(SHARE * depth)))
            pulses.append(StackPulse(side, first_layers(own), max(gradients), max(moved[first])))
            start += depth
        return pulses

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

    def _remedy(self, pulse: StackPulse) -> str:
        if pulse.moved < MOVED:
            return "start again with a smaller train.eps"
        beside = "the decoder no longer reads the source; " if pulse.side == "encoder" and "decoder" in self.found_dead else ""
        return f"{beside}start again with a lower train.lr, more train.warmup_steps, train.eps = 1e-4, or another recipe"
