"""Learning rates that fall from the top of a model to its input."""

from __future__ import annotations

from torch import nn

from kilolayer.layers.embedding import Embedding, TokenTypes
from kilolayer.layers.stack import Stack


def layer_rates(model: nn.Module, decay: float) -> dict[nn.Parameter, float]:
    """What the learning rate of each weight is multiplied by: decay^(L - l) in layer l of a stack of L, counted from 1.

    Below the first layer are its stack's positions and input norm, decay^L, and the tables of tokens and of sentence types, by
    the deepest stack, also where the output has the same table. Weights that are not listed have the factor 1. They stand above
    all layers, as a head, an output table of its own or a final norm; or between them, as DLCL's combination, whose one matrix
    serves them all.
    """
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    rates: dict[nn.Parameter, float] = {}
    if decay == 1 or not stacks:
        return rates
    for module in model.modules():
        if isinstance(module, Embedding | TokenTypes):
            rates[module.weight] = decay ** max(len(stack.blocks) for stack in stacks)
    for stack in stacks:
        layers = stack.layers()
        rates |= dict.fromkeys([*stack.positions.parameters(), *stack.input_norm.parameters()], decay ** len(layers))
        for index, layer in enumerate(layers, 1):
            for part in (layer, *stack.stream.of_layer(index - 1)):
                rates |= dict.fromkeys(part.parameters(), decay ** (len(layers) - index))
    return rates
