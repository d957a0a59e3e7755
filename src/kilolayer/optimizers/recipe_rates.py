"""Factors on learning rate, eps and weight decay by the role of a weight, as the model's recipe defines them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from kilolayer.layers.convolution import Convolution, Doubling
from kilolayer.layers.embedding import Embedding, VocabularyProjection
from kilolayer.layers.grid_positions import LearnedGrid
from kilolayer.layers.norms.base import Norm
from kilolayer.layers.patches import PatchEmbedding, PatchProjection
from kilolayer.layers.projection import Projection
from kilolayer.layers.scale import LearnedScale
from kilolayer.layers.stack import Stack
from kilolayer.models.adapt.rates import adapted_rates
from kilolayer.models.model import Model
from kilolayer.moe.experts import ExpertProjection
from kilolayer.moe.router import Router
from kilolayer.recipes.base import Part, Rates, Side
from kilolayer.recipes.role import Role


def recipe_rates(model: nn.Module) -> dict[nn.Parameter, Rates]:
    """The factors of each weight of the models inside `model`, ours or adapted; weights that are not listed have none."""
    own = (found for inner in model.modules() if isinstance(inner, Model) for found in _rates_of(inner))
    return {weight: rates for weight, rates in (*own, *adapted_rates(model).items()) if rates != Rates()}


def _rates_of(model: Model) -> Iterator[tuple[nn.Parameter, Rates]]:
    config = model.config
    for module, side, part in _named_modules(model):
        for name, weight in module.named_parameters(recurse=False):
            found = {config.recipe.rates(each, side, config.depths, config.dim) for each in _kinds(module, name, weight, part)}
            assert len(found) == 1, f"{config.recipe.name} gives {found} to the parts of one matrix"
            rates = found.pop()
            yield weight, replace(rates, lr=rates.lr * module.rate) if isinstance(module, LearnedScale) else rates


def _named_modules(model: Model) -> Iterator[tuple[nn.Module, Side, Part]]:
    """Every module with its stack, and the part that its weights belong to unless the module says otherwise."""
    yield model, model.config.depths.sides[0], Part.POSITIONS  # its own weight is the vector in the place of hidden patches
    for child in model.children():
        if isinstance(child, Model):  # with rates by its own depth and width
            continue
        if not isinstance(child, Stack):
            side = _side_of_table(model, child)
            for module in child.modules():
                yield module, side, Part.TOP
            continue
        for name, part in child.named_children():
            usual = {"blocks": Part.SCALE, "stream": Part.SCALE, "positions": Part.POSITIONS}.get(name, Part.TOP)
            for module in part.modules():
                yield module, child.side, usual


def _side_of_table(model: Model, table: nn.Module) -> Side:
    """The side of a table: the encoder's if it is the source table or shared by both sides."""
    sides = model.config.depths.sides
    source = getattr(model, "source_embedding", None)
    of_source = isinstance(table, Embedding) and (source is None or table is source)
    return sides[0] if of_source else sides[-1]


def _kinds(module: nn.Module, name: str, weight: nn.Parameter, usual: Part) -> set[Role | Part]:
    """The roles of one weight of a module; several if one matrix serves several projections."""
    match module:
        case Projection() | ExpertProjection():
            return {role for role, _ in module.parts} if name == "weight" else {Part.BIAS}
        case Convolution() | Doubling() if name == "weight":  # of a map head
            return {Role.HEAD}
        case nn.Linear():  # in a user-defined module
            return {Role.FFN_IN} if name == "weight" else {Part.BIAS}
        case Router() if weight.dim() > 1:
            return {Role.ROUTER}
        case Embedding():
            return {Part.EMBEDDING}
        # Their vectors are not scaled by sqrt(dim), as those of an embedding table are; a step moves them as positions.
        case PatchEmbedding() | PatchProjection() | LearnedGrid():
            return {Part.POSITIONS}
        case VocabularyProjection():
            return {Part.VOCABULARY}
        case Norm() if usual is Part.SCALE:
            return {Part.NORM}
        case _:
            return {usual}
