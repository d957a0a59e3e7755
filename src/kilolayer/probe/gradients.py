"""Gradient norms by layer, by kind of sublayer and by stack, and their size relative to Adam's eps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kilolayer.layers.block import Block
from kilolayer.layers.modules import in_mode
from kilolayer.models.model import Model
from kilolayer.optimizers.recipe_rates import recipe_rates
from kilolayer.probe.hooks import ByKind, ByLayer
from kilolayer.probe.propagation import Loss
from kilolayer.recipes.base import Rates


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
    layers = {stack.side: list(stack.layers()) for stack in model.stacks()}
    return gradients_by_layer(model, loss, layers)


def gradients_by_layer(model: nn.Module, loss: Callable[[Any], Tensor], stacks: Mapping[str, Sequence[nn.Module]]) -> Gradients:
    """As `measure_gradients`, for the layers of each stack of any model."""
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
    for side, blocks in stacks.items():
        kinds[side] = {kind: tuple(_norm(block.get_submodule(kind), squares) for block in blocks) for kind in _kinds(blocks[0])}
        layers[side] = tuple(_norm(block, squares) for block in blocks)
        roots = [math.sqrt(sum(weight.numel() for weight in block.parameters() if weight in squares) or 1) for block in blocks]
        per_parameter[side] = tuple(_norm(block, squares) / root for block, root in zip(blocks, roots, strict=True))
        over_factor[side] = tuple(_norm(block, over_factors) / root for block, root in zip(blocks, roots, strict=True))
    return Gradients(kinds, layers, per_parameter, over_factor, math.sqrt(sum(squares.values())))


def _kinds(block: nn.Module) -> list[str]:
    """The names of a layer's sublayers; in a layer of another library, of its parts that have weights."""
    if isinstance(block, Block):
        return list(map(str, block.kinds()))
    return [name for name, part in block.named_children() if any(True for _ in part.parameters())]


def _norm(module: nn.Module, squares: dict[nn.Parameter, float] | dict[Tensor, float]) -> float:
    found = [squares[weight] for weight in module.parameters() if weight in squares]
    return math.sqrt(sum(found)) if found else math.nan
