"""Refuse weights that `adapt` and `bake` cannot set: computed, quantized and shared ones, and those with an adapter."""

from __future__ import annotations

from torch import nn

from kilolayer.errors import InputError
from kilolayer.models.adapt.stacks import ForeignModel, ForeignStack
from kilolayer.models.adapt.sublayers import Matrix


def check_weights(model: nn.Module, found: ForeignModel) -> None:
    """Raise unless each projection is a parameter of its own, and all layers of a stack have one width."""
    names = {module: name for name, module in model.named_modules()}
    first: dict[tuple[nn.Parameter, int], str] = {}
    for stack in found.stacks:
        for _, _, sublayer in stack.sublayers():
            for matrix in sublayer.matrices:
                name = names[matrix.owner]
                weight = _weight(matrix, name)
                if (other := first.setdefault((weight, matrix.part), name)) != name:
                    raise InputError(
                        f"{other} and {name} have one weight, and a recipe needs a weight of its own in each sublayer",
                        fix="build the layers without sharing their weights",
                    )
        _check_width(stack)


def _weight(matrix: Matrix, name: str) -> nn.Parameter:
    """The parameter that holds a matrix; raises if setting it would not set the product."""
    parameters = dict(matrix.owner.named_parameters())
    weight = parameters.get(matrix.weight)
    others = sorted(parameters.keys() - {matrix.weight, matrix.bias, *matrix.others})
    if weight is None and "q_proj_weight" in parameters:
        raise InputError(
            "attention with kdim or vdim is not supported: it has no in_proj_weight",
            where=name,
            fix="project its keys and values to the width of its queries before it, and leave kdim and vdim out",
        )
    if others:
        raise InputError(
            f"the weight of this module is not the only one in its product: {', '.join(others)}",
            where=name,
            fix="merge them into one weight first: torch.nn.utils.parametrize.remove_parametrizations for a weight norm, "
            "merge_and_unload for a LoRA of peft",
        )
    if weight is None or not weight.is_floating_point():
        raise InputError(
            f"this {type(matrix.owner).__name__} has no weight in floating point",
            where=name,
            fix="give the model as it was before it was quantized",
        )
    return weight


def _check_width(stack: ForeignStack) -> None:
    widths = sorted({sublayer.width for _, _, sublayer in stack.sublayers()})
    if len(widths) > 1:
        raise InputError(
            f"the layers have different widths: {', '.join(map(str, widths))}",
            where=stack.name,
            fix="a recipe is for a residual stream of one width: build all layers with the same",
        )
