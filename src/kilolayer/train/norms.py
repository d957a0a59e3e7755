"""What each layer does in a step: the size of its gradient, of its update and of the residual stream after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kilolayer.models.model import Model
from kilolayer.train.optimizer import Optimizer

ByLayer = dict[str, list[float]]
Layers = dict[str, list[list[Tensor]]]


@dataclass
class LayerNorms:
    """Norms by stack and layer: of the gradient and of the update of a layer's weights, and the residual's root mean square."""

    gradient: ByLayer = field(default_factory=dict)
    update: ByLayer = field(default_factory=dict)
    residual: ByLayer = field(default_factory=dict)


@contextmanager
def watch_residuals(model: Model, norms: LayerNorms) -> Iterator[None]:
    """Fill `norms.residual` from the forwards run inside: one value a layer, the mean of its forwards."""
    handles = []
    # A layer compiled for all layers is called without their hooks.
    compiled = {stack: stack.compiled for stack in model.stacks()}
    seen: dict[str, list[list[float]]] = {}
    for stack in model.stacks():
        stack.compiled = None
        seen[stack.side] = [[] for _ in stack.blocks]
        for block, values in zip(stack.blocks, seen[stack.side], strict=True):

            def note(_: nn.Module, __: object, output: Tensor, values: list[float] = values) -> None:
                values.append(float(output.detach().float().square().mean().sqrt()))

            handles.append(block.register_forward_hook(note))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for stack, function in compiled.items():
            stack.compiled = function
    norms.residual = {side: [sum(values) / len(values) for values in layers] for side, layers in seen.items()}


def gradient_norms(model: Model, optimizer: Optimizer, factor: float) -> ByLayer:
    """The norm of the gradient times `factor`, layer by layer; absent gradients count as 0."""
    return {
        side: [factor * _norm(tensors) for tensors in layers]
        for side, layers in _by_layer(model, optimizer.gradients()).items()
    }


def copy_layers(model: Model, optimizer: Optimizer) -> Layers:
    """The weights of each layer as they are now, for `update_norms` after the step."""
    weights = _by_layer(model, optimizer.precise())
    return {side: [[tensor.clone() for tensor in tensors] for tensors in layers] for side, layers in weights.items()}


def update_norms(model: Model, optimizer: Optimizer, before: Layers) -> ByLayer:
    """The norm of what a step changed, layer by layer."""
    return {
        side: [
            _norm([new - old for new, old in zip(news, olds, strict=True)])
            for news, olds in zip(layers, before[side], strict=True)
        ]
        for side, layers in _by_layer(model, optimizer.precise()).items()
    }


def _by_layer(model: Model, named: Mapping[str, Tensor]) -> Layers:
    """Tensors by the name of a weight, sorted into stacks and layers."""
    layers: Layers = {stack.side: [[] for _ in stack.blocks] for stack in model.stacks()}
    for name, tensor in named.items():
        side, *path = name.split(".")
        if path[0] == "blocks":
            layers[side][int(path[1])].append(tensor)
    return layers


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([tensor.float().norm() for tensor in tensors]).norm()) if tensors else 0.0
