"""Muon: momentum whose singular values are made equal, for hidden matrices; AdamW for all other weights.

Keller Jordan, https://kellerjordan.github.io/posts/muon; the second factor is that of Moonlight (arXiv:2502.16982).
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn

from kilolayer.config import bounded
from kilolayer.optimizers.base import Number, Part, UpdateRule
from kilolayer.optimizers.hidden_matrices import hidden_matrices
from kilolayer.optimizers.registry import register
from kilolayer.optimizers.rules.adamw import AdamW

if TYPE_CHECKING:
    from kilolayer.optimizers.weight_factors import WeightFactors

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of a x + b x^3 + c x^5: a slope at 0 as large as possible, while singular values stay between about 0.7 and 1.2."""
SMALLEST = 1e-7
"""The least norm that a matrix is divided by."""
AT_ONCE = 2**27
"""Numbers in the matrices that are orthogonalized together, which bounds the memory of their products."""


Factor = Literal["match_rms_adamw", "original"]


@register
@dataclass(frozen=True)
class Muon(UpdateRule):
    """`Orthogonal` for hidden matrices, AdamW for all other weights, with the same learning rate and weight decay."""

    momentum: float = bounded(0.95, least=0, below=1)
    """Decay rate of the running mean of the gradient of hidden matrices."""
    nesterov: bool = True
    """Count the last gradient once more."""
    iterations: int = bounded(5, least=1, most=99)
    """Newton-Schulz iterations."""
    factor: Factor = "match_rms_adamw"
    """Factor on the learning rate of a matrix: match_rms_adamw is 0.2 sqrt(max(rows, columns)) and moves each number about as
    far as AdamW does, so that learning rates of AdamW fit; original is sqrt(max(1, rows / columns))."""
    beta1: float = bounded(0.9, least=0, below=1)
    """Of AdamW: decay rate of the running mean of the gradient."""
    beta2: float = bounded(0.98, least=0, below=1)
    """Of AdamW: decay rate of the running mean of the squared gradient."""
    eps: float = bounded(1e-8, above=0, most=1e30)
    """Of AdamW: added to the square root of the second moment."""
    weight_decay: float = bounded(0.0, least=0, most=1e30)
    """Weight decay of matrices and embeddings."""

    def rule_for(self, weight: WeightFactors, shape: torch.Size) -> tuple[UpdateRule, Hashable]:
        if weight.rows is None:
            return AdamW(self.beta1, self.beta2, self.eps, self.weight_decay), None
        own = Orthogonal(self.momentum, self.nesterov, self.iterations, self.factor, weight.rows, self.weight_decay)
        return own, shape

    def state_bytes(self, model: nn.Module) -> int:
        hidden = hidden_matrices(model)
        return sum((4 if weight in hidden else 8) * weight.numel() for weight in model.parameters())


@dataclass(frozen=True)
class Orthogonal(UpdateRule):
    """w <- w - lr (factor NS(u) + decay w), u = (1 - momentum) gradient + momentum mean, mean the running mean of the gradient.

    All weights that are updated together have one shape, [sum of rows, columns], or of experts [experts, sum of rows, columns].
    NS is `orthogonalized`, in one batch for all of them: rows are those of the projections in a weight, each a matrix of its
    own. Without Nesterov's form, u is the mean.
    """

    name: ClassVar[str] = Muon.name
    title: ClassVar[str] = Muon.title
    slots: ClassVar[tuple[str, ...]] = ("mean",)
    elementwise: ClassVar[bool] = False
    guards: ClassVar[bool] = True

    momentum: float
    nesterov: bool
    iterations: int
    factor: Factor
    rows: tuple[int, ...]
    weight_decay: float

    def update(self, part: Part, numbers: Sequence[Number]) -> None:
        lr, _ = numbers
        at_once = max(1, AT_ONCE // part.weights[0].numel())
        for start in range(0, len(part.weights), at_once):
            few = slice(start, start + at_once)
            weights, gradients, means = part.weights[few], part.gradients[few], part.state["mean"][few]
            if part.finite is not None:  # a step that is skipped repeats the mean, at a rate of 0
                gradients = [torch.where(part.finite, *pair) for pair in zip(gradients, means, strict=True)]
                lr = torch.where(part.finite, lr, 0.0)
            torch._foreach_lerp_(means, gradients, 1 - self.momentum)
            inputs = torch._foreach_lerp(gradients, means, self.momentum) if self.nesterov else means
            changes = list(self.directions(torch.stack(list(inputs))))
            if self.decay:
                torch._foreach_add_(changes, weights, alpha=self.decay)
            torch._foreach_mul_(changes, part.rates[few])
            torch._foreach_mul_(changes, lr)
            torch._foreach_sub_(weights, changes)

    def directions(self, inputs: Tensor) -> Tensor:
        """factor NS(u) of each projection of each weight: [weights, (experts,) sum of rows, columns] to the same shape."""
        out = torch.empty_like(inputs)
        starts = [sum(self.rows[:index]) for index in range(len(self.rows))]
        for size in dict.fromkeys(self.rows):
            own_starts = [start for start, rows in zip(starts, self.rows, strict=True) if rows == size]
            stacked = torch.stack([inputs.narrow(-2, start, size) for start in own_starts])
            matrices = stacked.flatten(0, -3)
            few = matrices.split(max(1, AT_ONCE // matrices[0].numel()))
            orthogonal = torch.cat([orthogonalized(each, self.iterations) for each in few]).view(stacked.shape)
            for start, each in zip(own_starts, orthogonal, strict=True):
                out.narrow(-2, start, size).copy_(each).mul_(self.factor_of(size, inputs.shape[-1]))
        return out

    def factor_of(self, rows: int, columns: int) -> float:
        """The factor on the learning rate of a matrix."""
        return 0.2 * math.sqrt(max(rows, columns)) if self.factor == "match_rms_adamw" else math.sqrt(max(1, rows / columns))

    def health(self, part: Part, numbers: Sequence[Number], count: int) -> tuple[Tensor, Tensor]:
        norms = torch.stack(torch._foreach_norm(part.state["mean"], 2))
        *experts, _, columns = part.weights[0].shape
        # Each of min(rows, columns) singular values of a matrix becomes about 1, unless the matrix is too small to be scaled.
        square = sum(self.factor_of(rows, columns) ** 2 * min(rows, columns) for rows in self.rows) * math.prod(experts)
        return norms / (1 - self.momentum**count), (norms / SMALLEST).clamp(max=1.0) * math.sqrt(square) * numbers[0]

    def settled_direction(self, gradient: Tensor, weight: Tensor, state: dict[str, Tensor], count: int) -> Tensor:
        return self.directions(gradient[None])[0]


def orthogonalized(matrices: Tensor, iterations: int) -> Tensor:
    """U V^T, about, of matrices U S V^T: [matrices, rows, columns] to the same shape, by Newton-Schulz iterations.

    Each applies a x + b x^3 + c x^5 to all singular values x. On a GPU the products are in bf16.
    """
    a, b, c = COEFFICIENTS
    x = matrices / torch.linalg.matrix_norm(matrices, keepdim=True).clamp(min=SMALLEST)
    x = x.bfloat16() if x.is_cuda else x
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
