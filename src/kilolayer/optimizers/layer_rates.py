"""Layer-wise learning rate decay: rates that fall from the top of a model to its input."""

from __future__ import annotations

from torch import nn

from kilolayer.convert.adapt.rates import foreign_layer_rates
from kilolayer.errors import InputError
from kilolayer.layers.embedding import Embedding, TokenTypes
from kilolayer.layers.stack import Stack


def layer_rates(model: nn.Module, decay: float) -> dict[nn.Parameter, float]:
    """The factor on the learning rate of each weight: decay^(L - l) in layer l of a stack of L, counted from 1.

    The positions and the input norm of a stack are below its first layer and have decay^L. So do the tables of tokens and of
    sentence types, with the L of the deepest stack, even if the output shares the table. Weights that are not listed have the
    factor 1: those above all layers, such as a head, a separate output table or a final norm, and those that all layers share,
    such as DLCL's combination matrix. Models of torch and Transformers that `kl.adapt` supports are counted alike. Without a
    stack of layers, a decay raises an error.
    """
    if decay == 1:
        return {}
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    rates = foreign_layer_rates(model, decay)
    if not stacks and not rates:
        raise InputError(
            "layer_decay would have no effect: this model has no stack of layers of a known class",
            where=type(model).__name__,
            fix="leave it at 1, or give a model of Kilolayer or one that kl.adapt supports",
        )
    for module in model.modules():
        if stacks and isinstance(module, Embedding | TokenTypes):
            rates[module.weight] = decay ** max(len(stack.blocks) for stack in stacks)
    for stack in stacks:
        layers = stack.layers()
        rates |= dict.fromkeys([*stack.positions.parameters(), *stack.input_norm.parameters()], decay ** len(layers))
        for index, layer in enumerate(layers, 1):
            for part in (layer, *stack.stream.of_layer(index - 1)):
                rates |= dict.fromkeys(part.parameters(), decay ** (len(layers) - index))
    return rates
