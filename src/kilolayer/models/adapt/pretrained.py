"""Adapted models and Transformers' own files: `save_pretrained` writes the recipe too, and loaded weights are recognized."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from kilolayer.errors import InputError
from kilolayer.models.adapt.additions import Additions
from kilolayer.models.adapt.applied import applied_to, is_adapted
from kilolayer.models.adapt.stacks import ForeignModel
from kilolayer.models.adapt.transformers_classes import options_of
from kilolayer.models.sharded import plain_class

logger = logging.getLogger(__name__)

ENTRY = "kilolayer"
"""The name in config.json under which a model's recipe is stored."""


class SavePretrained:
    """`save_pretrained` of an adapted model: its config.json names the recipe, so that `kl.load_model` restores the model.

    whole: whether the model has all stacks of the recipe. Without the others' depths, the recipe has other constants, so the
    files of a part do not name it.
    """

    def __init__(self, model: Any, whole: bool) -> None:
        self.model, self.whole = model, whole

    def __call__(self, save_directory: Any, *arguments: Any, **options: Any) -> Any:
        if not self.whole or not is_adapted(self.model):  # kl.bake may have been given only a part
            return self._save_plainly(save_directory, *arguments, **options)
        # By default, Transformers gives some weights the names of earlier releases, which `kl.load_model` does not find.
        if options.setdefault("save_original_format", False):
            raise InputError(
                "save_original_format=True renames weights, and kl.load_model could not find their parameters",
                where="save_pretrained of an adapted model",
                fix="remove it",
            )
        entry = entry_of(self.model)
        with _entry_in_config(self.model.config, entry):
            result = type(self.model).save_pretrained(self.model, save_directory, *arguments, **options)
        if not entry["plain"]:
            logger.warning(
                "%s is saved with its recipe: load it with kl.load_model(%r); from_pretrained gives another function",
                plain_class(self.model).__name__,
                str(save_directory),
            )
        return result

    def _save_plainly(self, *arguments: Any, **options: Any) -> Any:
        result = type(self.model).save_pretrained(self.model, *arguments, **options)
        if any(isinstance(module, Additions) and not module.changes_nothing for module in self.model.modules()):
            logger.warning(
                "%s is a part of an adapted model, and is saved without its recipe: from_pretrained gives another function. "
                "Save the whole model, or call kl.bake on it before",
                plain_class(self.model).__name__,
            )
        return result


def attach_save(model: nn.Module, found: ForeignModel) -> None:
    """Give each model of Transformers in `model` that has layers of these stacks a `save_pretrained` that keeps the recipe."""
    layers = {layer for stack in found.stacks for layer in stack.layers}
    for module in model.modules():
        if not any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__):
            continue
        if own := layers.intersection(module.modules()):
            # Set on the object, so that the class, and its models without a recipe, are unaffected.
            vars(module)["save_pretrained"] = SavePretrained(module, whole=own == layers)


def detach_save(model: nn.Module) -> None:
    """Undo `attach_save`, and remove what a configuration says about the recipe that the model no longer has."""
    for module in model.modules():
        if isinstance(vars(module).get("save_pretrained"), SavePretrained):
            del vars(module)["save_pretrained"]
            vars(module.config).pop(ENTRY, None)


def entry_of(model: nn.Module) -> dict[str, Any]:
    """What config.json says about the recipe of an adapted model.

    plain: whether its class computes the same function without the recipe. adds_weights: whether the recipe has its own.
    """
    applied = applied_to(model)
    return {
        "recipe": applied.recipe.table(),
        "plain": applied.plain,
        "adds_weights": applied.adds_weights,
        **options_of(model),
    }


def has_lost_weights(model: nn.Module, found: ForeignModel) -> bool:
    """Whether `from_pretrained` loaded the model from the files of an adapted one, without the weights that a recipe added."""
    entry = getattr(getattr(model, "config", None), ENTRY, None)
    return isinstance(entry, dict) and bool(entry.get("adds_weights")) and was_loaded(model, found)


def was_loaded(model: nn.Module, found: ForeignModel) -> bool:
    """Whether Transformers' `from_pretrained` gave the layers their weights."""
    layers = {layer for stack in found.stacks for layer in stack.layers}
    # Transformers marks each weight that it loads, and the model; a copy of the model has only the second mark.
    if any(getattr(weight, "_is_hf_initialized", False) for layer in layers for weight in layer.parameters()):
        return True
    marked = (module for module in model.modules() if "_weight_conversions" in vars(module))
    return any(not layers.isdisjoint(module.modules()) for module in marked)


@contextmanager
def _entry_in_config(config: Any, entry: dict[str, Any]) -> Iterator[None]:
    """Set the entry while the files are written: other models may share the configuration."""
    before = vars(config).get(ENTRY)
    setattr(config, ENTRY, entry)
    try:
        yield
    finally:
        delattr(config, ENTRY)
        if before is not None:
            setattr(config, ENTRY, before)
