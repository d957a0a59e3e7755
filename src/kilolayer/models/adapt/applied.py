"""The recipe of an adapted model, as read from the modules that `adapt` put into its layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from kilolayer.errors import InputError
from kilolayer.models.adapt.additions import Additions, attribute
from kilolayer.models.adapt.stacks import ForeignStack, find
from kilolayer.models.adapt.sublayers import ForeignSublayer
from kilolayer.recipes.base import Recipe


@dataclass(frozen=True)
class Applied:
    """The recipe of a whole model.

    plain: whether the model's class computes the same function without it.
    adds_weights: whether the recipe has weights of its own in the state dict.
    """

    recipe: Recipe
    plain: bool
    adds_weights: bool


def is_adapted(model: nn.Module) -> bool:
    """Whether a recipe has been applied to the model, or to a part of it."""
    return any(isinstance(module, Additions) for module in model.modules())


def additions_of(stack: ForeignStack) -> Iterator[tuple[nn.Module, ForeignSublayer, Additions]]:
    """What a recipe added to each sublayer of a stack, with its layer; nothing if it has no recipe."""
    for _, layer, sublayer in stack.sublayers():
        additions = getattr(layer, attribute(sublayer.kind), None)
        if isinstance(additions, Additions):
            yield layer, sublayer, additions


def applied_to(model: nn.Module) -> Applied:
    """The recipe that a single call of `adapt` gave to an adapted model; raises if its stacks were adapted one by one."""
    found = find(model)
    additions = [each for stack in found.stacks for _, _, each in additions_of(stack)]
    recipe = additions[0].recipe
    sublayers = sum(1 for stack in found.stacks for _ in stack.sublayers())
    if len(additions) < sublayers or any((each.recipe, each.depths) != (recipe, found.depths) for each in additions):
        raise InputError(
            "the stacks of this model were adapted one by one, so that no single recipe describes it",
            fix="give the recipe to the whole model at once: kl.adapt(model, recipe)",
        )
    return Applied(recipe, all(each.changes_nothing for each in additions), any(each.state_dict() for each in additions))
