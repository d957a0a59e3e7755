"""Gradient norms by layer, by kind of sublayer and by stack, and their size relative to Adam's eps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kilolayer.layers.modules import in_mode
from kilolayer.models.model import Model
from kilolayer.probe.places import ByKind, ByLayer
from kilolayer.probe.propagation import Loss
from kilolayer.recipes.base import Rates
from kilolayer.training.recipe_rates import recipe_rates


@dataclass(frozen=True)
class Gradients:
    """Gradient norms of each sublayer, of each layer and of the whole model; NaN where no weight is trained.

    per_parameter: the root mean square of a layer's gradient. over_factor: the same, with each weight's gradient divided by the
    factor that the recipe applies to the weight's eps.
    """

    kinds: ByKind
    layers: ByLayer
    per_parameter: ByLayer
    over_factor: ByLayer
    total: float

    @property
    def trained(self) -> ByLayer:
        """The norms of the layers that have trainable weights, by stack; stacks without such layers are left out."""
        kept = {side: tuple(norm for norm in norms if not math.isnan(norm)) for side, norms in self.layers.items()}
        return {side: norms for side, norms in kept.items() if norms}

    @property
    def largest(self) -> float:
        """The largest norm of any layer; 0 if none is trained."""
        return max((norm for norms in self.trained.values() for norm in norms), default=0.0)

    def over_eps(self, eps: float) -> ByLayer:
        """The root-mean-square gradient of each layer, divided by the eps of its weights; far below 1, Adam's update vanishes.

        eps: Adam's eps, before the recipe's factors.
        """
        return {side: tuple(norm / eps for norm in norms) for side, norms in self.over_factor.items()}


def measure_gradients(model: Model, loss: Loss) -> Gradients:
    """Measure the gradient of `loss` at the current weights, without dropout; .grad is not changed."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    with in_mode(model, training=False):
        found = torch.autograd.grad(loss(model), trained, allow_unused=True)
    squares = {
        weight: 0.0 if gradient is None else float(gradient.double().square().sum())
        for weight, gradient in zip(trained, found, strict=True)
    }
    rates = recipe_rates(model)
    over_factors = {weight: square / rates.get(weight, Rates()).eps ** 2 for weight, square in squares.items()}
    kinds: ByKind = {}
    layers: ByLayer = {}
    per_parameter: ByLayer = {}
    over_factor: ByLayer = {}
    for stack in model.stacks():
        blocks = stack.layers()
        kinds[stack.side] = {
            str(kind): tuple(_norm(block.get_submodule(kind), squares) for block in blocks) for kind in blocks[0].kinds()
        }
        layers[stack.side] = tuple(_norm(block, squares) for block in blocks)
        roots = [math.sqrt(sum(weight.numel() for weight in block.parameters() if weight in squares) or 1) for block in blocks]
        per_parameter[stack.side] = tuple(_norm(block, squares) / root for block, root in zip(blocks, roots, strict=True))
        over_factor[stack.side] = tuple(_norm(block, over_factors) / root for block, root in zip(blocks, roots, strict=True))
    return Gradients(kinds, layers, per_parameter, over_factor, math.sqrt(sum(squares.values())))


def _norm(module: nn.Module, squares: dict[nn.Parameter, float] | dict[Tensor, float]) -> float:
    found = [squares[weight] for weight in module.parameters() if weight in squares]
    return math.sqrt(sum(found)) if found else math.nan
