"""The factors on each weight's learning rate, eps and weight decay, and what kind of weight it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from kilolayer.errors import InputError
from kilolayer.layers.embedding import Embedding, TokenTypes
from kilolayer.layers.grid_positions import LearnedGrid
from kilolayer.layers.patches import PatchEmbedding
from kilolayer.layers.position import RelativeBias
from kilolayer.layers.scale import HeadScale
from kilolayer.layers.stack import Stack
from kilolayer.layers.stream import LayerCombination
from kilolayer.models.adapt.rates import foreign_layer_rates
from kilolayer.models.patch_decoder import PatchDecoder
from kilolayer.moe.experts import ExpertNorm
from kilolayer.moe.layer import expert_parameters
from kilolayer.optimizers.hidden_matrices import HiddenMatrix, hidden_matrices
from kilolayer.optimizers.recipe_rates import recipe_rates
from kilolayer.recipes.base import Rates

NO_MATRICES = (ExpertNorm, HeadScale, LayerCombination, RelativeBias)
"""Norms, scales and biases whose weights have several axes: experts, heads, layers, distances."""


@dataclass(frozen=True)
class WeightFactors:
    """Factors on the optimizer's options for one weight; decay is 0 if the weight is not decayed.

    of_experts: whether each expert of a sparse model has its own copy of the weight. hidden: the projections in a
    hidden matrix; None for other weights.
    """

    lr: float
    decay: float
    eps: float
    is_matrix: bool
    of_experts: bool
    hidden: HiddenMatrix | None = None


def trained_weights(model: nn.Module, layer_decay: float) -> Iterator[tuple[str, nn.Parameter, WeightFactors]]:
    """Every trained weight with its name and its factors: those of its layer times those of the recipe.

    Matrices and tables are decayed; norms, biases and scales are not.
    """
    scales = {weight for part in model.modules() if isinstance(part, NO_MATRICES) for weight in part.parameters(recurse=False)}
    experts = {name for name, _ in expert_parameters(model)}
    by_layer, by_recipe, hidden = layer_rates(model, layer_decay), recipe_rates(model), hidden_matrices(model)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            of_experts = name in experts
            is_matrix = weight.dim() > (2 if of_experts else 1) and weight not in scales
            rates = by_recipe.get(weight, Rates())
            lr = by_layer.get(weight, 1.0) * rates.lr
            decay = rates.decay if is_matrix else 0.0
            yield name, weight, WeightFactors(lr, decay, rates.eps, is_matrix, of_experts, hidden.get(weight))


def layer_rates(model: nn.Module, decay: float) -> dict[nn.Parameter, float]:
    """The factor on the learning rate of each weight: decay^(L - l) in layer l of a stack of L, counted from 1.

    The positions and the input norm of a stack are below its first layer and have decay^L. So do the tables of tokens and of
    sentence types, with the L of the deepest stack, even if the output shares the table, and the projection, tokens and
    positions of an image's patches. Weights that are not listed have the factor 1: those above all layers, such as a head, a
    separate output table or a final norm, and those that all layers share, such as DLCL's combination matrix. Models
    of torch and Transformers that `kl.adapt` supports are counted alike. Without a stack of layers, a decay raises an error.
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
    lowest = decay ** max((len(stack.blocks) for stack in stacks), default=0)
    for module in model.modules():
        if stacks and isinstance(module, Embedding | TokenTypes | PatchEmbedding | LearnedGrid):
            rates |= dict.fromkeys(module.parameters(), lowest)
        if isinstance(module, PatchDecoder):
            rates[module.mask_token] = lowest
    for stack in stacks:
        layers = stack.layers()
        rates |= dict.fromkeys([*stack.positions.parameters(), *stack.input_norm.parameters()], decay ** len(layers))
        for index, layer in enumerate(layers, 1):
            for part in (layer, *stack.stream.of_layer(index - 1)):
                rates |= dict.fromkeys(part.parameters(), decay ** (len(layers) - index))
    return rates
