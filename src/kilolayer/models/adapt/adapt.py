"""Apply a recipe to an existing model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from kilolayer import recipes
from kilolayer.errors import InputError, shown
from kilolayer.layers.initialize import KeyedGenerator, draw_seed, initialize, new_tensors
from kilolayer.models.adapt.additions import Additions, attribute
from kilolayer.models.adapt.applied import is_adapted
from kilolayer.models.adapt.fit import Obstacle, obstacle
from kilolayer.models.adapt.pretrained import attach_save, has_lost_weights, was_loaded
from kilolayer.models.adapt.stacks import ForeignModel, ForeignStack, find
from kilolayer.models.adapt.sublayers import ForeignSublayer
from kilolayer.models.adapt.weights import check_weights
from kilolayer.recipes.base import Constants, Depths, Place, Plan, Recipe, Side, norm_spec
from kilolayer.recipes.role import Role


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
    model: nn.Module, recipe: str | Recipe = recipes.DEFAULT, *, start: bool | None = None, seed: int | None = None
) -> Adaptation:
    """Give a model of torch or of Hugging Face's Transformers a recipe, in place, and new weights to all of its layers.

    Its layers are found by their class. Their weights are drawn again as the recipe specifies (projections and biases by
    role, norms 1), and hooks change the residual; inputs and outputs of the model stay the same. An unsupported class, or a
    recipe that does not fit the class, raises an error before anything is changed.

    start: False leaves the weights as they are. True draws new ones even if the model was loaded with `from_pretrained`; such
    a model is refused unless one of the two is given.
    seed: fixes the weights; without it, a seed is drawn from torch's default generator.
    """
    recipe = recipes.parse(recipe)
    found = find(model)
    _check(model, found, start)
    check_weights(model, found)
    check_fit(found, recipe)
    if start or start is None:
        seed = draw_seed() if seed is None else seed
        start_weights(model, found, recipe, seed)
    elif seed is not None:
        raise InputError("seed has no effect with start=False", fix="remove one of them")
    before = set(model.state_dict())
    attach(model, found, recipe)
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


def check_fit(found: ForeignModel, recipe: Recipe) -> None:
    """Raise if a recipe cannot be applied to a model of this kind."""
    recipe.check_depths(found.depths)
    if (hindrance := _obstacle(found, recipe)) is not None:
        fitting = [name for name in recipes.names() if _obstacle(found, recipes.get(name)) is None]
        raise hindrance.error(recipe, found.title, fitting)


def _obstacle(found: ForeignModel, recipe: Recipe) -> Obstacle | None:
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
            return hindrance
    return None


def attach(model: nn.Module, found: ForeignModel, recipe: Recipe) -> None:
    """Put what the recipe adds into the layers of a model, and register its hooks; weights are not touched."""
    for stack in found.stacks:
        _attach_to_stack(stack, recipe, found.depths)
    attach_save(model, found)


def _check(model: nn.Module, found: ForeignModel, start: bool | None) -> None:
    if is_adapted(model):
        raise InputError(
            "this model already has a recipe",
            fix="build the model again, or merge the recipe into its weights with kl.bake first",
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError("this model is on the meta device", fix="give it memory first: model.to_empty(device=...)")
    if not start and has_lost_weights(model, found):
        raise InputError(
            "this model was saved with a recipe, and from_pretrained has not loaded the weights that the recipe added",
            where=_origin(model),
            fix="load the folder with kl.load_model(folder), which restores the weights and the recipe",
        )
    if start is None and was_loaded(model, found):
        raise InputError(
            "this model was loaded with from_pretrained, and kl.adapt would replace the weights of its layers by new ones",
            where=_origin(model),
            fix="say what to do with them: kl.adapt(..., start=False) keeps them, and start=True draws new ones",
        )


def _origin(model: nn.Module) -> str:
    name = getattr(model, "name_or_path", None)
    return f"{type(model).__name__} from {shown(name)}" if name else type(model).__name__


def _attach_to_stack(stack: ForeignStack, recipe: Recipe, depths: Depths) -> None:
    previous: nn.Module | None = None
    first: Additions | None = None
    for number, layer, sublayer in stack.sublayers():
        place = Place(sublayer.kind, stack.side, number, depths)
        weight = sublayer.last.values
        with new_tensors(weight.device, weight.dtype):
            input_norm = norm_spec(recipe.input_norm(stack.side, depths)) if first is None else None
            additions = Additions(recipe, place, sublayer, stack.norm_first, input_norm)
        initialize(additions, seed=0)  # everything added starts at constants: nothing is random
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
        generator = KeyedGenerator(seed, names[matrix.owner])
        generator.draw_(matrix.values, plan, matrix.role, matrix.key, matrix.start, fan_out)
        bias = matrix.bias_values
        if bias is not None:
            generator.bias_(bias, plan, matrix.role, matrix.values.shape[1], f"{matrix.key}.bias")
    for name, parameter in sublayer.norm.named_parameters():
        parameter.fill_(0.0 if name == "bias" else 1.0)
