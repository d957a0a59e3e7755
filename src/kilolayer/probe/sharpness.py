"""Sharpness: the largest eigenvalue of the loss's Hessian, plain or preconditioned by Adam, found by power iteration."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kilolayer.layers.modules import in_mode
from kilolayer.models.model import Model
from kilolayer.probe.propagation import Loss
from kilolayer.runtime.runtime import PLAIN

Vector = list[Tensor]
"""A vector over all parameters: one tensor for each."""
SETTLED = 0.1
"""A vector with a larger residual is a mixture of two eigenvectors with eigenvalues of opposite sign and similar size."""


@dataclass(frozen=True)
class Sharpness:
    """value: the largest eigenvalue. products: the number of Hessian-vector products used.

    residual: ||A v - value v|| / |value| for the unit vector v that was found; some eigenvalue of A differs from `value` by at
    most this relative error.
    """

    value: float
    residual: float
    products: int


def sharpness(
    model: Model,
    loss: Loss,
    *,
    denominators: Sequence[Tensor] | None = None,
    most: int = 100,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> Sharpness:
    """The largest eigenvalue of the Hessian H of `loss` in the parameters that are trained, without dropout.

    denominators: the numbers D by which the optimizer divides gradients, one tensor per trained parameter in the model's order,
    as from `adam_denominators`. The result is then the largest eigenvalue of D^-1/2 H D^-1/2, which is also one of D^-1 H. Adam
    is unstable if it exceeds (2 + 2 beta1) / ((1 - beta1) lr), which is 38 / lr for beta1 = 0.9 (Cohen et al. 2022).
    most: the maximum number of Hessian-vector products, each about two backward passes; iteration ends earlier if one of them
    changes the value by less than `tolerance`, relatively. Weights, gradients and the random state are not changed.
    """
    parameters = trained_parameters(model)
    roots = None if denominators is None else [each.to(p).sqrt() for each, p in zip(denominators, parameters, strict=True)]
    # The fused forms of attention and of the loss cannot be differentiated twice.
    with in_mode(model, training=False), sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        gradients = torch.autograd.grad(loss(PLAIN.bind(model)), parameters, create_graph=True, materialize_grads=True)
        # A constant gradient, as of a weight that enters linearly, has no graph to differentiate again.
        bent = [index for index, gradient in enumerate(gradients) if gradient.requires_grad]

        def product(vector: Vector) -> Vector:
            inner = vector if roots is None else [each / root for each, root in zip(vector, roots, strict=True)]
            if not bent:
                return [torch.zeros_like(each) for each in vector]
            found = torch.autograd.grad(
                [gradients[index] for index in bent],
                parameters,
                [inner[index] for index in bent],
                retain_graph=True,
                materialize_grads=True,
            )
            return list(found) if roots is None else [each / root for each, root in zip(found, roots, strict=True)]

        return largest_eigenvalue(product, _random_vector(parameters, seed), most, tolerance)


def largest_eigenvalue(product: Callable[[Vector], Vector], start: Vector, most: int, tolerance: float) -> Sharpness:
    """The largest eigenvalue of the symmetric matrix A; product: computes A v; start: a vector of norm 1.

    Power iteration finds the eigenvalue of largest absolute value r. If it is negative, or a positive one is about as large,
    iteration continues with A + r I, which has no negative eigenvalues.
    """
    found = _iterate(product, start, 0.0, max(1, most // 2), tolerance)
    positive = found.value > 0 and found.residual < SETTLED
    left = most - found.products
    if left < 1 or not math.isfinite(found.size) or found.size == 0 or (positive and found.settled):
        return Sharpness(found.value, found.residual, found.products)
    begin, shift = (found.vector, 0.0) if positive else (start, found.size)
    last = _iterate(product, begin, shift, left, tolerance)
    return Sharpness(last.value, last.residual, found.products + last.products)


@dataclass(frozen=True)
class _Iterated:
    """The result of power iteration with A + shift I. size: the largest absolute eigenvalue of it; settled: it converged."""

    value: float
    residual: float
    products: int
    size: float
    settled: bool
    vector: Vector


def _iterate(product: Callable[[Vector], Vector], start: Vector, shift: float, most: int, tolerance: float) -> _Iterated:
    vector, size, products = start, 0.0, 0
    while True:
        image = product(vector)
        products += 1
        value = float(_dot(vector, image))
        missed = float(_norm([each - value * part for each, part in zip(image, vector, strict=True)]))
        moved = [each + shift * part for each, part in zip(image, vector, strict=True)]
        before, size = size, float(_norm(moved))
        settled = not math.isfinite(size) or abs(size - before) <= tolerance * size
        if settled or products == most:
            return _Iterated(value, missed / abs(value) if value else math.inf, products, size, settled, vector)
        vector = [each / size for each in moved]


def adam_denominators(squares: Sequence[Tensor], updates: int, *, beta2: float, eps: float) -> list[Tensor]:
    """Adam's denominators sqrt(v / (1 - beta2^t)) + eps, from the running means v of squared gradients after t >= 1 updates."""
    left = 1 - beta2**updates
    return [(square / left).sqrt() + eps for square in squares]


def first_denominators(model: Model, loss: Loss, *, eps: float) -> list[Tensor]:
    """|g| + eps: Adam's denominators in its first step, from the gradient g of `loss` without dropout."""
    parameters = trained_parameters(model)
    with in_mode(model, training=False), torch.enable_grad():
        gradients = torch.autograd.grad(loss(model), parameters, materialize_grads=True)
    return [gradient.abs() + eps for gradient in gradients]


def trained_parameters(model: Model) -> list[Tensor]:
    """The parameters that are trained, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _random_vector(parameters: Sequence[Tensor], seed: int) -> Vector:
    """A random vector of norm 1, drawn on the CPU, so that it is the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(each.shape, generator=generator).to(each) for each in parameters]
    size = float(_norm(drawn))
    return [each / size for each in drawn]


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    return torch.stack([(a * b).sum(dtype=torch.float64) for a, b in zip(left, right, strict=True)]).sum()


def _norm(vector: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.double().square().sum() for part in vector]).sum().sqrt()
