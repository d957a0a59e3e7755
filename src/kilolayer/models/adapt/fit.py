"""Which recipes can be applied to a class, and for the others the reason.

A recipe fits if each field of its plans can be applied without changing the class's forward: as a norm or a scale where a
module begins or ends. A Post-LN class computes N(x + f(x)) and a Pre-LN class x + f(N(x)); the position of N cannot change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kilolayer.errors import InputError
from kilolayer.recipes.base import Depths, Learned, Place, Plan, Recipe, Scale, Side


@dataclass(frozen=True)
class Obstacle:
    """Why a recipe cannot be applied to a model, and what to do instead."""

    reason: str
    fix: str = ""

    def error(self, recipe: Recipe, title: str, fitting: Sequence[str]) -> InputError:
        """The error that `adapt` raises. fitting: names of recipes that fit the model."""
        fix = self.fix or f"choose one that does: {', '.join(fitting)}"
        return InputError(f"{recipe.name} does not fit {title}: {self.reason}", fix=fix)


def obstacle(
    recipe: Recipe, *, norm_first: bool, depths: Depths, sides: tuple[Side, ...], width: int, lacks_final_norm: bool = False
) -> Obstacle | None:
    """Why `recipe` cannot be applied to stacks of this kind; None if it can."""
    if recipe.stream() is not None:
        return Obstacle("it changes what is passed from layer to layer (`stream`), which the class's own forward fixes")
    for side in sides:
        for layer in range(1, depths.of(side) + 1):
            for kind in depths.kinds(side):
                found = _plan_obstacle(recipe.plan(Place(kind, side, layer, depths)), norm_first)
                if found is not None:
                    return found
        found = _stack_obstacle(recipe, side, depths, norm_first and lacks_final_norm)
        if found is not None:
            return found
    if recipe.calibration() is not None:
        return Obstacle(
            "its residual scales are measured on a batch (`calibration`), which works only for models of Kilolayer",
            fix=f'use its form without data: kl.recipes.get("{recipe.name}", start="closed")',
        )
    if recipe.output_factor(width) != 1:
        return Obstacle(
            f"at width {width} it scales what the vocabulary reads (`output_factor`), for tables that start as Kilolayer's do",
            fix=f'set its base to this width: kl.recipes.get("{recipe.name}", base_width={width})',
        )
    return None


def fixed_number(scale: Scale) -> float | None:
    """The value of a constant scale; None if it is learned."""
    if isinstance(scale, Learned):
        return None if scale.trainable else scale.init
    return scale if isinstance(scale, float | int) else scale.value


def _plan_obstacle(plan: Plan, norm_first: bool) -> Obstacle | None:
    if plan.shifts:
        return Obstacle("it adds learned shifts inside the sublayers (`shifts`)")
    if not plan.bias:
        return Obstacle("its projections have no bias (`bias`)")
    if not plan.pre_norm and not plan.out_norm:
        return Obstacle("its sublayers have no norm (`pre_norm`, `out_norm`), but those of this class have one")
    if norm_first and plan.out_norm:
        return Obstacle("its norm is on the sum (`out_norm`), LN(x + f(x)), but that of this class is before f, x + f(LN(x))")
    if not norm_first and not plan.out_norm:
        return Obstacle("its norm is before f (`pre_norm`), x + f(LN(x)), but that of this class is on the sum, LN(x + f(x))")
    if norm_first and fixed_number(plan.skip) != 1:
        return Obstacle("it scales the residual of a Pre-LN sublayer (`skip`), which no module of this class holds")
    if isinstance(plan.branch, Learned) and plan.branch.per == "layer":
        return Obstacle("the sublayers of a layer share one learned scale (`branch`)")
    return None


def _stack_obstacle(recipe: Recipe, side: Side, depths: Depths, lacks_final_norm: bool) -> Obstacle | None:
    top = recipe.top(side, depths)
    if top.shift or top.scale:
        return Obstacle("it has a learned shift or scale on top of the stack (`top`)")
    if top.norm and lacks_final_norm:
        return Obstacle(
            "it has a norm on top of the stack (`top`), and this model has none there",
            fix="build it with one: nn.TransformerEncoder(layer, num_layers, norm=nn.LayerNorm(d_model))",
        )
    if recipe.embedding_gain(side, depths) != 1 or recipe.vocabulary_gain() != 1:
        return Obstacle("it starts the tables of the vocabulary by depth (`embedding_gain`, `vocabulary_gain`)")
    return None
