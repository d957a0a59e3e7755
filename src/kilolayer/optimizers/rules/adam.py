"""Adam (Kingma and Ba, arXiv:1412.6980)."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kilolayer.config import bounded
from kilolayer.optimizers.base import AdamKernel, Number, Part, UpdateRule
from kilolayer.optimizers.registry import register


@register
@dataclass(frozen=True)
class Adam(UpdateRule):
    """w <- w - step * mean / (root * sqrt(square) + offset), with decay * w added to the gradient.

    mean and square are the running means of the gradient and of its square. After t updates, step = lr / (1 - beta1^t), root =
    1 / sqrt(1 - beta2^t), offset = eps.
    """

    slots: ClassVar[tuple[str, ...]] = ("mean", "square")
    changes_from_state: ClassVar[bool] = True
    decoupled: ClassVar[bool] = False

    beta1: float = bounded(0.9, least=0, below=1)
    """Decay rate of the running mean of the gradient."""
    beta2: float = bounded(0.98, least=0, below=1)
    """Decay rate of the running mean of the squared gradient."""
    eps: float = bounded(1e-8, above=0, most=1e30)
    """Added to the square root of the second moment."""
    weight_decay: float = bounded(0.0, least=0, most=1e30)
    """Weight decay of matrices and embeddings."""

    @property
    def kernel(self) -> AdamKernel | None:
        return AdamKernel(self.beta1, self.beta2, self.decoupled)

    def numbers(self, lr: Tensor, count: Tensor) -> Tensor:
        """lr, step, root and offset."""
        left1, left2 = 1 - self.beta1**count, 1 - self.beta2**count
        return torch.stack([lr, lr / left1, left2.rsqrt(), torch.full_like(count, self.eps)])

    def update(self, part: Part, numbers: Sequence[Number]) -> None:
        lr, step, root, offset = map(float, numbers)
        weights, gradients, means, squares = part.weights, part.gradients, part.state["mean"], part.state["square"]
        if self.decay and self.decoupled:
            torch._foreach_mul_(weights, [1 - lr * rate * self.decay for rate in part.rates])
        elif self.decay:
            gradients = torch._foreach_add(gradients, weights, alpha=self.decay)
        torch._foreach_lerp_(means, gradients, 1 - self.beta1)
        torch._foreach_mul_(squares, self.beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - self.beta2)
        roots = self._roots(squares, root, offset)
        torch._foreach_addcdiv_(weights, means, roots, [-step * rate for rate in part.rates])

    def changes(self, part: Part, numbers: Sequence[Tensor]) -> list[Tensor]:
        lr, step, root, offset = numbers
        changes = torch._foreach_div(part.state["mean"], self._roots(part.state["square"], root, offset))
        torch._foreach_mul_(changes, step)
        if any(rate != 1 for rate in part.rates):
            torch._foreach_mul_(changes, part.rates)
        if self.decay and self.decoupled:
            # w' = (1 - lr decay) w - change, so that w - w' = (change + lr decay w') / (1 - lr decay).
            for change, weight, rate in zip(changes, part.weights, part.rates, strict=True):
                change.add_(weight * (lr * rate * self.decay)).div_(1 - lr * rate * self.decay)
        return list(changes)

    def health(self, part: Part, numbers: Sequence[Number], count: int) -> tuple[Tensor, Tensor]:
        _, step, root, offset = numbers
        means, seen = part.state["mean"], 1 - self.beta1**count
        if self.decay and not self.decoupled:
            # The mean also contains decay * w. Weights change slowly, so that this part is about decay * w * (1 - beta1^t).
            means = torch._foreach_sub(means, torch._foreach_mul(part.weights, self.decay * seen))
        moved = torch._foreach_div(means, self._roots(part.state["square"], root, offset))
        return torch.stack(torch._foreach_norm(means, 2)) / seen, torch.stack(torch._foreach_norm(moved, 2)) * step

    def settled_direction(self, gradient: Tensor, weight: Tensor, state: dict[str, Tensor], count: int) -> Tensor:
        one = torch.ones((), dtype=torch.float64)
        _, step, root, offset = self.numbers(one, count * one).tolist()
        return step * gradient / (root * state["square"].sqrt() + offset)

    @staticmethod
    def _roots(squares: list[Tensor], root: Number, offset: Number) -> list[Tensor]:
        """root * sqrt(square) + offset."""
        roots = list(torch._foreach_sqrt(squares))
        torch._foreach_mul_(roots, root)
        if isinstance(offset, Tensor):
            torch.ops.aten._foreach_add_.Tensor(roots, offset)  # the short name would read the number back
        else:
            torch._foreach_add_(roots, offset)
        return roots
