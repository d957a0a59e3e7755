"""Dead units: the share of a feed-forward network's ReLUs that are 0 on a whole batch, and so get no gradient from it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kilolayer.layers.feedforward import FeedForward
from kilolayer.models.model import Model
from kilolayer.moe.experts import Experts
from kilolayer.moe.groups import Groups
from kilolayer.probe.hooks import ByLayer, compute, forward_hooks, layer_and_module
from kilolayer.probe.propagation import Loss


def dead_units(model: Model, loss: Loss) -> ByLayer:
    """The share by stack and layer; empty if the activation is not ReLU, NaN for a layer with a user's own network.

    Only experts that received a token are counted.
    """
    found: dict[str, dict[int, float]] = {stack.side: {} for stack in model.stacks()}
    groups: list[Groups] = []
    with forward_hooks(model) as hooks:
        for stack in hooks.stacks:
            for name, module in stack.named_modules():
                if not isinstance(module, FeedForward | Experts) or not isinstance(module.activation, nn.ReLU):
                    continue
                layer, _ = layer_and_module(name)
                assert layer is not None

                def record(
                    _relu: nn.Module, _inputs: object, output: Tensor, layer: int = layer, side: str = stack.side
                ) -> None:
                    if output.dim() == 3:
                        dead = ~(hooks.real_positions(side, output) > 0).any(dim=0)
                    else:  # the rows of experts
                        dead = _dead_of_experts(output, groups[-1])
                    found[side][layer] = float(dead.double().mean())

                if isinstance(module, Experts):
                    hooks.before(module, lambda _experts, inputs: groups.append(inputs[1]))
                hooks.after(module.activation, record)
        compute(model, loss)
    depths = {stack.side: len(stack.blocks) for stack in model.stacks()}
    return {
        side: tuple(layers.get(layer, math.nan) for layer in range(depths[side])) for side, layers in found.items() if layers
    }


def _dead_of_experts(rows: Tensor, groups: Groups) -> Tensor:
    """Which units of each expert are 0 on all of its rows: bool [experts with rows, units]."""
    ends = groups.ends.tolist()
    parts = [rows[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True) if end > start]
    return torch.stack([~(part > 0).any(dim=0) for part in parts])
