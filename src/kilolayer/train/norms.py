"""What each layer does in a step: the size of its gradient, of its update and of the residual stream after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kilolayer.models.model import Model

ByLayer = dict[str, list[float]]


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
    seen: dict[str, list[list[float]]] = {}
    for stack in model.stacks():
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
    norms.residual = {side: [sum(values) / len(values) for values in layers] for side, layers in seen.items()}


def gradient_norms(model: Model) -> ByLayer:
    """The gradient's norm, layer by layer; absent gradients count as 0."""
    return {
        stack.side: [_norm([p.grad for p in block.parameters() if p.grad is not None]) for block in stack.blocks]
        for stack in model.stacks()
    }


def copy_layers(model: Model) -> dict[str, list[list[Tensor]]]:
    """The weights of each layer as they are now, for `update_norms` after the step."""
    return {
        stack.side: [[p.detach().clone() for p in block.parameters()] for block in stack.blocks] for stack in model.stacks()
    }


def update_norms(model: Model, before: dict[str, list[list[Tensor]]]) -> ByLayer:
    """The norm of what a step changed, layer by layer."""
    return {
        stack.side: [
            _norm([new.detach() - old for new, old in zip(block.parameters(), weights, strict=True)])
            for block, weights in zip(stack.blocks, before[stack.side], strict=True)
        ]
        for stack in model.stacks()
    }


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([tensor.float().norm() for tensor in tensors]).norm()) if tensors else 0.0
