"""Initialize the weights of another library's layers for a recipe: its initial weights times the gain of each role."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kilolayer.convert.adapt.stacks import ForeignModel
from kilolayer.convert.adapt.sublayers import ForeignSublayer
from kilolayer.layers.initialise import Noise
from kilolayer.recipes.base import Place, Plan, Recipe
from kilolayer.recipes.role import Role


@torch.no_grad()
def start_weights(model: nn.Module, found: ForeignModel, recipe: Recipe, seed: int) -> None:
    """Initialize the projections, biases and norms of all layers; embeddings, heads and the final norm are left unchanged.

    The random numbers of each matrix are seeded by the seed and by its name in `model`.
    """
    names = {module: name for name, module in model.named_modules()}
    for stack in found.stacks:
        for layer, _, sublayer in stack.sublayers():
            plan = recipe.sublayer_plan(Place(sublayer.kind, stack.side, layer, found.depths))
            _start_sublayer(sublayer, plan, names, seed)


def _start_sublayer(sublayer: ForeignSublayer, plan: Plan, names: dict[nn.Module, str], seed: int) -> None:
    attention = [matrix for matrix in sublayer.matrices if matrix.role in (Role.QUERY_KEY, Role.VALUE)]
    together = sum(len(matrix.values) for matrix in attention) if plan.init.draw(Role.VALUE).joint else None
    for matrix in sublayer.matrices:
        fan_out = together if matrix in attention else None
        noise = Noise(seed, names[matrix.owner])
        noise.draw_(matrix.values, plan, matrix.role, matrix.key, matrix.start, fan_out)
        bias = matrix.bias_values
        if bias is not None:
            noise.bias_(bias, plan, matrix.role, matrix.values.shape[1], f"{matrix.key}.bias")
    for name, parameter in sublayer.norm.named_parameters():
        _start_norm(name, parameter)


def _start_norm(name: str, parameter: Tensor) -> None:
    parameter.fill_(0.0 if name == "bias" else 1.0)
