"""Apply a recipe to an existing model."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from torch import nn

from kilolayer import recipes
from kilolayer.convert.adapt.additions import Additions, attribute
from kilolayer.convert.adapt.fit import obstacle
from kilolayer.convert.adapt.stacks import ForeignModel, ForeignStack, find
from kilolayer.convert.adapt.start import start_weights
from kilolayer.errors import InputError
from kilolayer.layers.initialise import draw_seed, initialise, new_tensors
from kilolayer.recipes.base import Constants, Depths, Place, Recipe, Side

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adaptation:
    """What `adapt` did to a model.

    constants: the recipe's constants, by stack.
    sublayers: the number of residual sublayers changed, by stack.
    added: the names of the parameters and buffers that the recipe added; an optimizer created before does not have them.
    seed: of the initial weights; None if they were left unchanged.
    notes: further remarks for the user.
    """

    recipe: Recipe
    model: str
    depths: Depths
    constants: dict[Side, Constants]
    sublayers: dict[Side, int]
    added: tuple[str, ...]
    seed: int | None
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.model} under {self.recipe.title}: {self.recipe.equation}"]
        for side, count in self.sublayers.items():
            numbers = "".join(f", {name} {value:.4g}" for name, value in self.constants[side].items())
            lines.append(f"  {side}: {self.depths.of(side)} layers, {count} sublayers{numbers}")
        lines.append("  weights left as they were" if self.seed is None else f"  weights initialized from seed {self.seed}")
        if self.added:
            lines.append(f"  {len(self.added)} tensors added: {self.added[0]}{', ...' if len(self.added) > 1 else ''}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    __repr__ = __str__


def adapt(
    model: nn.Module, recipe: str | Recipe = recipes.DEFAULT, *, start: bool = True, seed: int | None = None
) -> Adaptation:
    """Give a model of torch or of Hugging Face's Transformers a recipe, in place.

    Its layers are found by their class. Their weights are initialized as the recipe specifies (projections and biases by
    role, norms 1), and hooks change the residual; inputs and outputs of the model stay the same. An unsupported class, or a
    recipe that does not fit the class, raises an error before anything is changed.

    start: False leaves the weights as they are, to load what was saved with the same recipe.
    seed: fixes the weights; without it, a seed is drawn from torch's default generator.
    """
    recipe = recipes.parse(recipe)
    found = find(model)
    _check(model, found, recipe)
    if start:
        seed = draw_seed() if seed is None else seed
        start_weights(model, found, recipe, seed)
    elif seed is not None:
        raise InputError("seed has no effect with start=False", fix="remove one of them")
    before = set(model.state_dict())
    for stack in found.stacks:
        _attach(stack, recipe, found.depths)
    if hasattr(model, "save_pretrained"):
        # Set on the object, so that the class, and its models without a recipe, are unaffected.
        model.__dict__["save_pretrained"] = SavedWithWarning(model)
    return Adaptation(
        recipe=recipe,
        model=f"{type(model).__name__} ({found.title})",
        depths=found.depths,
        constants={stack.side: recipe.constants(stack.side, found.depths) for stack in found.stacks},
        sublayers={stack.side: sum(1 for _ in stack.sublayers()) for stack in found.stacks},
        added=tuple(name for name in model.state_dict() if name not in before),
        seed=seed,
        notes=_notes(found, recipe),
    )


class SavedWithWarning:
    """`save_pretrained` of an adapted model; warns that its files hold the weights, but not the recipe's changes."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        name = type(self.model).__name__
        logger.warning(
            "%s is saved without its recipe: from_pretrained gives another function. Load it and call "
            "kl.adapt(..., start=False), or call kl.bake before saving",
            name,
        )
        return type(self.model).save_pretrained(self.model, *arguments, **options)


def is_adapted(stack: ForeignStack) -> bool:
    """Whether a recipe has been applied to this stack."""
    return any(isinstance(module, Additions) for layer in stack.layers for module in layer.children())


def _check(model: nn.Module, found: ForeignModel, recipe: Recipe) -> None:
    if any(map(is_adapted, found.stacks)):
        raise InputError(
            "this model already has a recipe",
            fix="build the model again, or merge the recipe into its weights with kl.bake first",
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError("this model is on the meta device", fix="give it memory first: model.to_empty(device=...)")
    recipe.check_depths(found.depths)
    for stack in found.stacks:
        hindrance = obstacle(
            recipe,
            norm_first=stack.norm_first,
            depths=found.depths,
            sides=(stack.side,),
            width=found.width,
            lacks_final_norm=stack.lacks_final_norm,
        )
        if hindrance is not None:
            raise hindrance.error(recipe, found.title)


def _attach(stack: ForeignStack, recipe: Recipe, depths: Depths) -> None:
    previous: nn.Module | None = None
    first: Additions | None = None
    for number, layer, sublayer in stack.sublayers():
        plan = recipe.plan(Place(sublayer.kind, stack.side, number, depths))
        weight = sublayer.last.values
        with new_tensors(weight.device, weight.dtype):
            additions = Additions(plan, sublayer, stack.norm_first, first is None and recipe.input_norm(stack.side, depths))
        initialise(additions, seed=0)  # everything added starts at constants: nothing is random
        starts_layer = not any(isinstance(module, Additions) for module in layer.children())
        additions.train(layer.training)
        layer.add_module(attribute(sublayer.kind), additions)
        additions.attach(sublayer, layer, None if starts_layer else previous)
        previous, first = sublayer.norm, first or additions
    # torch's encoder may pass its layers a nested tensor, which hooks and other modules' norms do not support.
    if first is not None and isinstance(stack.holder, nn.TransformerEncoder):
        for name in ("enable_nested_tensor", "use_nested_tensor"):
            first.change(stack.holder, name, False)


def _notes(found: ForeignModel, recipe: Recipe) -> tuple[str, ...]:
    notes = [recipe.training] if recipe.training else []
    for stack in found.stacks:
        kept = not recipe.top(stack.side, found.depths).norm
        if kept and isinstance(getattr(stack.holder, "norm", None), nn.Module):
            notes.append(f"The class's own norm on top of the {stack.side} stays, which the recipe does not have.")
    return tuple(notes)
