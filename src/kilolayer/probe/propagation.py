"""Signal propagation through depth: the gradient of each layer, and the size of one update."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kilolayer.layers.stack import Stack
from kilolayer.models.model import Model
from kilolayer.moe.experts import ExpertProjection
from kilolayer.optimizers.recipe_rates import recipe_rates

Loss = Callable[[Model], Tensor]


@dataclass(frozen=True)
class GradientProfile:
    """The gradient norm of the feed-forward weights of each layer, from the input on, for each stack."""

    encoder: tuple[float, ...] = ()
    decoder: tuple[float, ...] = ()


def gradient_profile(model: Model, loss: Loss) -> GradientProfile:
    """Measure the gradient of each layer's feed-forward matrices at the current weights; the model's .grad is cleared."""
    model.zero_grad(set_to_none=True)
    loss(model).backward()
    profile = GradientProfile(**{stack.side: tuple(_layer_norms(stack)) for stack in model.stacks()})
    model.zero_grad(set_to_none=True)
    return profile


def first_over_last(norms: tuple[float, ...], share: float = 0.1) -> float:
    """The mean norm of the first `share` of the layers over that of the last; 1 if gradients do not change with depth.

    NaN if the last layers have no gradient, as in a recipe whose branches are initialized to 0.
    """
    count = max(1, round(share * len(norms)))
    last = sum(norms[-count:])
    return sum(norms[:count]) / last if last else math.nan


def relative_update(
    model: Model,
    loss: Loss,
    output: Callable[[Model], Tensor],
    optimizer: Callable[..., torch.optim.Optimizer],
    moving: Literal["all", "matrices"] | Callable[[Any], list[nn.Parameter]] = "all",
) -> float:
    """||F(x, after one step) - F(x)|| / ||F(x)||: DeepNet's model update (equation 1), of a copy of the model without dropout.

    output: computes F(x). optimizer: creates the optimizer from the parameters, with its learning rate. moving: the parameters
    that are updated: all, only the matrices of the sublayers, as in DeepNet's Theorems 2 and 3, or those that a function finds.
    Adam's learning rate and eps are multiplied by the factors of the model's recipe.
    """
    start, trained = copy.deepcopy(model).eval(), copy.deepcopy(model).eval()
    find = {"all": lambda each: list(each.parameters()), "matrices": _matrices}[moving] if isinstance(moving, str) else moving
    weights = find(trained)
    factors = recipe_rates(trained)
    stepper = optimizer([{"params": [weight]} for weight in weights] if factors else weights)
    for group in stepper.param_groups:
        rates = factors.get(group["params"][0])
        if rates is not None and "eps" in group:
            group["lr"], group["eps"] = group["lr"] * rates.lr, group["eps"] * rates.eps
    loss(trained).backward()
    stepper.step()
    with torch.no_grad():
        before, after = output(start), output(trained)
    return float((after - before).norm() / before.norm())


def _matrices(model: Model) -> list[nn.Parameter]:
    return [weight for stack in model.stacks() for weight in _weights(stack.blocks)]


def _weights(module: nn.Module) -> list[nn.Parameter]:
    """The matrices of projections, including those in a user's own modules."""
    found = (part.weight for part in module.modules() if isinstance(part, nn.Linear | ExpertProjection))
    return [weight for weight in found if isinstance(weight, nn.Parameter)]


def _layer_norms(stack: Stack) -> list[float]:
    norms: list[float] = []
    for block in stack.blocks:
        weights = _weights(block.get_submodule("feedforward.f"))
        gradients = [weight.grad.norm() for weight in weights if weight.grad is not None]
        norms.append(float(torch.stack(gradients).norm()) if gradients else math.nan)
    return norms
