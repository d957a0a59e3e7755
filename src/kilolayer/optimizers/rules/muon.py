"""Muon: momentum whose singular values are made equal, for hidden matrices; AdamW for all other weights.

Keller Jordan, https://kellerjordan.github.io/posts/muon; the second factor is that of Moonlight (arXiv:2502.16982).
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn

from kilolayer.config import bounded
from kilolayer.optimizers.base import MatrixKernel, Number, Part, UpdateRule
from kilolayer.optimizers.hidden_matrices import HiddenMatrix, hidden_matrices
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

    elementwise: ClassVar[bool] = False

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
        if weight.hidden is None:
            return AdamW(self.beta1, self.beta2, self.eps, self.weight_decay), None
        own = Orthogonal(self.momentum, self.nesterov, self.iterations, self.factor, weight.hidden, self.weight_decay)
        return own, shape

    def state_bytes(self, model: nn.Module) -> int:
        hidden = hidden_matrices(model)
        return sum((4 if weight in hidden else 8) * weight.numel() for weight in model.parameters())


@dataclass(frozen=True)
class Orthogonal(UpdateRule):
    """w <- w - lr (factor NS(u) + decay w), u = (1 - momentum) gradient + momentum mean, mean the running mean of the gradient.

    All weights that are updated together have one shape, that of `matrix`. NS is `orthogonalized`, in one batch for all of
    them: each projection in a weight is a matrix of its own. Without Nesterov's form, u is the mean.
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
    matrix: HiddenMatrix
    weight_decay: float

    def update(self, part: Part, numbers: Sequence[Number]) -> None:
        lr, _ = numbers
        gradients, means = part.gradients, part.state["mean"]
        if part.finite is not None:  # a step that is skipped repeats the mean, at a rate of 0
            gradients = [torch.where(part.finite, *pair) for pair in zip(gradients, means, strict=True)]
            lr = torch.where(part.finite, lr, 0.0)
        torch._foreach_lerp_(means, gradients, 1 - self.momentum)
        at_once = matrices_at_once(part.weights[0])
        for start in range(0, len(means), at_once):
            few = slice(start, start + at_once)
            inputs = torch._foreach_lerp(gradients[few], means[few], self.momentum) if self.nesterov else means[few]
            changes = self.directions(torch.stack(list(inputs)))
            for weight, change, rate in zip(part.weights[few], changes, part.rates[few], strict=True):
                if self.decay:
                    weight.mul_(1 - lr * rate * self.decay)
                weight.sub_(change.to(weight.dtype).mul_(lr * rate))

    @property
    def kernel(self) -> MatrixKernel:
        return MatrixKernel(self.momentum, self.nesterov, self.directions, AT_ONCE)

    def directions(self, inputs: Tensor) -> Tensor:
        """factor NS(u) of each projection of each weight: [weights, (experts,) sum of rows, columns] to the same shape."""
        if self.matrix.transposed:
            inputs = inputs.mT
        columns, changes = inputs.shape[-1], []
        equal = [(rows, len(list(few))) for rows, few in groupby(self.matrix.rows)]
        for part, (rows, count) in zip(inputs.split([rows * count for rows, count in equal], -2), equal, strict=True):
            stacked = part.unflatten(-2, (count, rows))
            matrices = stacked.reshape(-1, rows, columns)
            factor = self.factor_of(rows, columns)
            few = [orthogonalized(each, self.iterations, factor) for each in matrices.split(matrices_at_once(matrices[0]))]
            changes.append(_joined(few, 0).view(stacked.shape).flatten(-3, -2))
        joined = _joined(changes, -2)
        return joined.mT.contiguous() if self.matrix.transposed else joined

    def factor_of(self, rows: int, columns: int) -> float:
        """The factor on the learning rate of a matrix."""
        return 0.2 * math.sqrt(max(rows, columns)) if self.factor == "match_rms_adamw" else math.sqrt(max(1, rows / columns))

    def health(self, part: Part, numbers: Sequence[Number], count: int) -> tuple[Tensor, Tensor]:
        norms = torch.stack(torch._foreach_norm(part.state["mean"], 2))
        *experts, outputs, columns = part.weights[0].shape
        columns = outputs if self.matrix.transposed else columns
        # Each of min(rows, columns) singular values of a matrix becomes about 1, unless the matrix is too small to be scaled.
        square = sum(self.factor_of(rows, columns) ** 2 * min(rows, columns) for rows in self.matrix.rows) * math.prod(experts)
        return norms / (1 - self.momentum**count), (norms / SMALLEST).clamp(max=1.0) * math.sqrt(square) * numbers[0]

    def settled_direction(self, gradient: Tensor, weight: Tensor, state: dict[str, Tensor], count: int) -> Tensor:
        return self.directions(gradient[None])[0].to(gradient.dtype)


def matrices_at_once(matrix: Tensor) -> int:
    """How many matrices of this size are orthogonalized together."""
    return max(1, AT_ONCE // matrix.numel())


def orthogonalized(matrices: Tensor, iterations: int, factor: float = 1.0) -> Tensor:
    """factor U V^T, about, of matrices U S V^T: [matrices, rows, columns] to the same shape, by Newton-Schulz iterations.

    Each is x <- (a + b g + c g^2) x with g = x x^T, so that a x + b x^3 + c x^5 is applied to all singular values. With y =
    c^(1/4) x and s = y y^T + b / (2 sqrt(c)) this is y <- (s^2 + a - b^2 / (4 c)) y: three products and two sums with a
    diagonal. On a GPU the products are in bf16.
    """
    a, b, c = COEFFICIENTS
    wide = torch.promote_types(matrices.dtype, torch.float32)
    norms = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=wide).clamp(min=SMALLEST)
    dtype = torch.bfloat16 if matrices.is_cuda else matrices.dtype
    y = torch.mul(matrices, c**0.25 / norms, out=torch.empty(matrices.shape, dtype=dtype, device=matrices.device))
    is_tall = y.shape[-2] > y.shape[-1]
    for left in reversed(range(iterations)):
        gram = y.mT @ y if is_tall else y @ y.mT
        gram.diagonal(dim1=-2, dim2=-1).add_(b / (2 * math.sqrt(c)))
        gram = gram @ gram
        gram.diagonal(dim1=-2, dim2=-1).add_(a - b**2 / (4 * c))
        if not left:  # where tall and wide matrices have fewer numbers
            gram.mul_(factor / c**0.25)
        y = y @ gram if is_tall else gram @ y
    return y


def _joined(tensors: list[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)
