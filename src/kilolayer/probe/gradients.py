"""The gradient by layer, by kind of sublayer and by stack, and how it stands to Adam's eps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kilolayer.layers.modules import in_mode
from kilolayer.models.model import Model
from kilolayer.probe.places import ByKind, ByLayer
from kilolayer.probe.propagation import Loss


@dataclass(frozen=True)
class Gradients:
    """Norms of the gradient: of all weights of each sublayer and of each layer, and of all of the model.

    per_parameter: the root mean square of a layer's gradient, what Adam's eps is added to.
    """

    kinds: ByKind
    layers: ByLayer
    per_parameter: ByLayer
    total: float

    @property
    def largest(self) -> float:
        """Of the layer with the largest."""
        return max(norm for norms in self.layers.values() for norm in norms)

    def over_eps(self, eps: float) -> dict[str, float]:
        """For each stack the smallest gradient a parameter of its layers over eps: far below 1, Adam's update vanishes."""
        return {side: min(norms) / eps for side, norms in self.per_parameter.items()}


def measure_gradients(model: Model, loss: Loss) -> Gradients:
    """The gradient of `loss` at the model's present weights, without dropout; .grad is left as it is."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    with in_mode(model, training=False):
        found = torch.autograd.grad(loss(model), trained, allow_unused=True)
    squares = {
        weight: 0.0 if gradient is None else float(gradient.double().square().sum())
        for weight, gradient in zip(trained, found, strict=True)
    }
    kinds: ByKind = {}
    layers: ByLayer = {}
    per_parameter: ByLayer = {}
    for stack in model.stacks():
        blocks = stack.layers()
        kinds[stack.side] = {
            str(kind): tuple(_norm(block.get_submodule(kind), squares) for block in blocks) for kind in blocks[0].kinds()
        }
        layers[stack.side] = tuple(_norm(block, squares) for block in blocks)
        sizes = [sum(weight.numel() for weight in block.parameters() if weight in squares) for block in blocks]
        per_parameter[stack.side] = tuple(
            norm / math.sqrt(max(size, 1)) for norm, size in zip(layers[stack.side], sizes, strict=True)
        )
    return Gradients(kinds, layers, per_parameter, math.sqrt(sum(squares.values())))


def _norm(module: nn.Module, squares: dict[nn.Parameter, float] | dict[Tensor, float]) -> float:
    return math.sqrt(sum(squares.get(weight, 0.0) for weight in module.parameters()))
