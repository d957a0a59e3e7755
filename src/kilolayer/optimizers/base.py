"""What an optimizer is: an update rule, with its options, the state that it keeps for each weight, and one formula."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from kilolayer.config import check

if TYPE_CHECKING:
    from kilolayer.optimizers.weight_factors import WeightFactors

Number = float | Tensor
"""A float, or in a step that may be recorded a tensor [], of which only the device knows the value."""


@dataclass
class Part:
    """Some weights of one group, as an update sees them, in fp32 or higher precision.

    gradients: times the factor of clipping and loss scaling. state: for each slot of the rule, one tensor per weight.
    rates: the factor on the learning rate of each weight. finite: bool [], whether to update at all; None if that is known.
    """

    weights: list[Tensor]
    gradients: list[Tensor]
    state: dict[str, list[Tensor]]
    rates: list[float]
    finite: Tensor | None = None

    def rows(self) -> list[tuple[Tensor, Tensor, dict[str, Tensor], float]]:
        """Weight, gradient, state and rate of one weight after the other."""
        names = list(self.state)
        states = [dict(zip(names, each, strict=True)) for each in zip(*self.state.values(), strict=True)] if names else None
        return list(zip(self.weights, self.gradients, states or [{} for _ in self.weights], self.rates, strict=True))


class AdamKernel(NamedTuple):
    """The constants of speed/operators/update_kernel.py. decoupled: decay the weights directly, not through the gradient."""

    beta1: float
    beta2: float
    decoupled: bool


class MatrixKernel(NamedTuple):
    """For speed/operators/update_kernel.py: w <- (1 - lr decay) w - lr directions(u), u the running mean of the gradient.

    nesterov: count the last gradient once more. directions: of stacked weights, [weights, ...] to the same shape. at_once: how
    many numbers are stacked.
    """

    momentum: float
    nesterov: bool
    directions: Callable[[Tensor], Tensor]
    at_once: int


@dataclass(frozen=True)
class UpdateRule:
    """One optimizer: w <- (1 - lr decay) w - lr u, where `direction` computes u from the gradient and the state.

    Its fields are its options. Those called beta1, beta2, eps and weight_decay have the values of the [train] table; others are
    given beside the name: `train.optimizer = { name = "lion", ... }`. Learning rate, decay, clipping, accumulation, fp32 copies
    of rounded weights, skipped steps, checkpoints and measurements are the same for all rules.

    name: of the optimizer in configurations, by default that of the class. title: its name in texts.
    slots: what is kept for each weight, each a tensor of its shape that starts at 0. One called "mean" must be a running mean
    of the gradient; the health of stacks is measured by it.
    elementwise: whether each number of u depends only on the same number of its inputs, so that weights can be joined.
    guards: whether `update` itself heeds `Part.finite`. records: whether an update can be recorded.
    changes_from_state: whether `changes` tells what an update changed; otherwise the weights before it are kept when measured.
    applied_by: the class that holds the state and applies the rule, if it is not `Optimizer`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    slots: ClassVar[tuple[str, ...]] = ()
    elementwise: ClassVar[bool] = True
    guards: ClassVar[bool] = False
    records: ClassVar[bool] = True
    changes_from_state: ClassVar[bool] = False
    applied_by: ClassVar[type[Any] | None] = None

    def __init_subclass__(cls) -> None:
        own = vars(cls)
        cls.name = own.get("name", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower())
        cls.title = own.get("title", cls.__name__)

    def __post_init__(self) -> None:
        check(self)

    def direction(self, gradient: Tensor, weight: Tensor, state: dict[str, Tensor], count: Number) -> Tensor:
        """u, of the shape of the weight. The tensors of `state` are changed in place; count: of this update, from 1.

        gradient, weight and state have the same shape, which need not be that of one weight if the rule is elementwise. Nothing
        may be read from the device.
        """
        raise NotImplementedError

    @property
    def kernel(self) -> AdamKernel | MatrixKernel | None:
        """The constants of the kernels for updates of Adam's kind or of whole matrices; None: this rule has no kernel."""
        return None

    @property
    def lacks_health(self) -> bool:
        """Whether `health` returns None for all weights; a rule that leaves the update to others may have it all the same."""
        cls = type(self)
        leaves = cls.applied_by is not None or cls.rule_for is not UpdateRule.rule_for
        return not leaves and "mean" not in cls.slots and cls.health is UpdateRule.health

    @property
    def decay(self) -> float:
        """The weight decay of the weights that are decayed."""
        return getattr(self, "weight_decay", 0.0)

    def with_factors(self, decay: float, eps: float) -> Self:
        """The rule for weights with these factors on its weight decay and eps."""
        changed = {"weight_decay": decay, "eps": eps}
        return replace(self, **{name: getattr(self, name) * factor for name, factor in changed.items() if hasattr(self, name)})

    def rule_for(self, weight: WeightFactors, shape: torch.Size) -> tuple[UpdateRule, Hashable]:
        """The rule that updates such a weight, and a key: weights with different keys are never in one group."""
        return self, None

    def state_bytes(self, model: nn.Module) -> int:
        """The bytes of the state of `model`, on any device, in fp32 and without copies of rounded weights."""
        return sum(4 * len(self.slots) * weight.numel() for weight in model.parameters())

    def numbers(self, lr: Tensor, count: Tensor) -> Tensor:
        """The numbers that update `count` needs, fp64 [...]: by default lr and count."""
        return torch.stack([lr, count])

    def update(self, part: Part, numbers: Sequence[Number]) -> None:
        """Update weights and state in place. numbers: as from `numbers`, floats or tensors []."""
        lr, count = numbers
        for weight, gradient, state, rate in part.rows():
            direction = self.direction(gradient, weight, state, count)
            if self.decay:
                weight.mul_(1 - lr * rate * self.decay)
            weight.sub_(direction * (lr * rate))

    def changes(self, part: Part, numbers: Sequence[Tensor]) -> list[Tensor]:
        """The change of each weight in the update with these numbers, from the state after it, if `changes_from_state`."""
        raise NotImplementedError

    def health(self, part: Part, numbers: Sequence[Number], count: int) -> tuple[Tensor, Tensor] | None:
        """The norms of the running gradient of each weight, and of its last change without decay (NaN if not known).

        [weights] each, after `count` updates; None if the rule keeps no running gradient.
        """
        if "mean" not in part.state:
            return None
        norms = torch.stack(torch._foreach_norm(part.state["mean"], 2))
        return norms, torch.full_like(norms, torch.nan)

    def settled_direction(self, gradient: Tensor, weight: Tensor, state: dict[str, Tensor], count: int) -> Tensor:
        """u for a gradient that is the running mean of the last ones; weight and state are not changed."""
        return self.direction(gradient, weight.clone(), {name: each.clone() for name, each in state.items()}, count)
