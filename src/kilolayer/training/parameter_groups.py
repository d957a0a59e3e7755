"""The factors on each weight's learning rate, eps and weight decay, for our optimizer and for any torch optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from kilolayer.errors import InputError, OptionError, shown
from kilolayer.moe.layer import expert_parameters
from kilolayer.recipes.base import Rates
from kilolayer.training.layer_rates import layer_rates
from kilolayer.training.recipe_rates import recipe_rates

USUAL_EPS = 1e-8
"""The default of torch's Adam and AdamW."""


@dataclass(frozen=True)
class WeightFactors:
    """Factors on the optimizer's options for one weight; decay is 0 if the weight is not decayed.

    of_experts: whether each expert of a sparse model has its own copy of the weight.
    """

    lr: float
    decay: float
    eps: float
    is_matrix: bool
    of_experts: bool


def trained_weights(model: nn.Module, layer_decay: float) -> Iterator[tuple[str, nn.Parameter, WeightFactors]]:
    """Every trained weight with its name and its factors: those of its layer times those of the recipe.

    Matrices and tables are decayed; norms, biases and scales are not.
    """
    experts = {name for name, _ in expert_parameters(model)}
    by_layer, by_recipe = layer_rates(model, layer_decay), recipe_rates(model)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            of_experts = name in experts
            is_matrix = weight.dim() > (2 if of_experts else 1)
            rates = by_recipe.get(weight, Rates())
            lr = by_layer.get(weight, 1.0) * rates.lr
            yield name, weight, WeightFactors(lr, rates.decay if is_matrix else 0.0, rates.eps, is_matrix, of_experts)


def parameter_groups(
    model: nn.Module, *, lr: float, weight_decay: float = 0.0, layer_decay: float = 1.0, eps: float | None = None
) -> list[dict[str, Any]]:
    """The weights of `model` for a torch optimizer, as `kilolayer train` would train them: `AdamW(parameter_groups(...))`.

    Each group has `params`, `lr` and `weight_decay`, including the factors of the model's recipe, such as CompleteP's, and of
    the layer. Matrices and tables are decayed; norms, biases and scales are not. Frozen weights are left out.
    model: one of our models, one that `kl.adapt` has changed, or a module that contains one, such as DistributedDataParallel.
    layer_decay: the factor on the learning rate from each layer to the one below it.
    eps: the optimizer's eps. If it is None, only groups whose eps the recipe changes have one, relative to 1e-8.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            "parameter_groups needs a model", fix="give the model, not its parameters: parameter_groups(model, lr=1e-3)"
        )
    given: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "layer_decay": layer_decay}
    for name, value in (given if eps is None else {**given, "eps": eps}).items():
        is_number = isinstance(value, int | float | Tensor)
        if not is_number or not (value > 0 or (name == "weight_decay" and value == 0)) or (name == "layer_decay" and value > 1):
            allowed = "lr, eps and layer_decay above 0, weight_decay at least 0, layer_decay at most 1"
            raise OptionError(f"{name} is {shown(value)}", fix=f"allowed: {allowed}")
    groups: dict[tuple[float, float, float], dict[str, Any]] = {}
    for _, weight, factors in trained_weights(model, layer_decay):
        key = (factors.lr, factors.decay, factors.eps)
        if key not in groups:
            groups[key] = {"params": [], "lr": lr * factors.lr, "weight_decay": weight_decay * factors.decay}
            if eps is not None or factors.eps != 1:
                groups[key]["eps"] = (USUAL_EPS if eps is None else eps) * factors.eps
        groups[key]["params"].append(weight)
    if not groups:
        raise InputError("this model has no trainable weights", fix="set requires_grad=True on some")
    return list(groups.values())
