"""Parameter groups for any torch optimizer, with the factors that `kilolayer train` applies."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kilolayer.errors import InputError, OptionError, shown
from kilolayer.optimizers import registry
from kilolayer.optimizers.weight_factors import trained_weights

USUAL_EPS = 1e-8
"""The default of torch's Adam and AdamW."""


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    layer_decay: float = 1.0,
    eps: float | None = None,
    optimizer: str | None = None,
) -> list[dict[str, Any]]:
    """The weights of `model` for a torch optimizer, as `kilolayer train` would train them: `AdamW(parameter_groups(...))`.

    Each group has `params`, `lr` and `weight_decay`, including the factors of the model's recipe, such as CompleteP's, and of
    the layer. Matrices and tables are decayed; norms, biases and scales are not. Frozen weights are left out.
    model: one of our models, one that `kl.adapt` has changed, or a module that contains one, such as DistributedDataParallel.
    layer_decay: the factor on the learning rate from each layer to the one below it.
    eps: the optimizer's eps. If it is None, only groups whose eps the recipe changes have one, relative to 1e-8.
    optimizer: if it is given, each group also has `optimizer`, the name of the one that updates it: with "muon", hidden
    matrices have "muon" and all other weights "adamw".
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
    rule = None if optimizer is None else registry.get(optimizer)
    groups: dict[tuple[float, float, float, str | None], dict[str, Any]] = {}
    for _, weight, factors in trained_weights(model, layer_decay):
        own = None if rule is None else rule.rule_for(factors, weight.shape)[0]
        key = (factors.lr, factors.decay, factors.eps, None if own is None else own.name)
        if key not in groups:
            groups[key] = {"params": [], "lr": lr * factors.lr, "weight_decay": weight_decay * factors.decay}
            if own is not None:
                groups[key]["optimizer"] = own.name
            if (eps is not None or factors.eps != 1) and (own is None or hasattr(own, "eps")):
                groups[key]["eps"] = (USUAL_EPS if eps is None else eps) * factors.eps
        groups[key]["params"].append(weight)
    if not groups:
        raise InputError("this model has no trainable weights", fix="set requires_grad=True on some")
    return list(groups.values())
