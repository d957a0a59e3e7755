"""Transformers' classes as data: the configuration from which the same model is built again."""

from __future__ import annotations

import importlib
import json
from typing import Any

from torch import nn

from kilolayer.errors import InputError, shown
from kilolayer.models.adapt.layouts import LAYOUTS
from kilolayer.models.adapt.stacks import check_depth
from kilolayer.models.sharded import plain_class

HOMES = {module for module, _ in LAYOUTS if module.startswith("transformers.")}
DEPTHS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
MOST_LABELS = 100_000
ATTENTION = ("eager", "sdpa")
"""The implementations of attention that are restored; the others depend on the machine."""


def describe(model: Any) -> dict[str, Any] | None:
    """The configuration of a model of one of the supported classes; None if it is none."""
    cls = plain_class(model)
    if _class(cls.__name__, cls.__module__) is not cls:
        return None
    return {**json.loads(model.config.to_json_string()), "architectures": [cls.__name__]}


def options_of(model: Any) -> dict[str, Any]:
    """What a configuration does not hold, as a table: an implementation of attention that is restored, and a missing pooler."""
    found = getattr(getattr(model, "config", None), "_attn_implementation", None)
    attention = {"attention": found} if found in ATTENTION else {}
    return attention | ({"pooler": False} if getattr(model, "pooler", model) is None else {})


def generation_of(model: Any) -> dict[str, Any]:
    """The settings of generation as a table; empty if the model has none."""
    found = getattr(model, "generation_config", None)
    return {} if found is None else {"generation": json.loads(found.to_json_string())}


def build(table: dict[str, Any], extras: dict[str, Any], most_layers: int) -> nn.Module:
    """The model that `describe` described, with its extras. most_layers: raise if a stack has more."""
    names = table.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    cls = next((found for home in HOMES if (found := _class(name, home)) is not None), None)
    if cls is None:
        raise InputError(f"the architecture is {shown(name)}", fix="only models that kl.adapt supports can be loaded")
    attention = extras.get("attention")
    options = {"attn_implementation": attention} if attention in ATTENTION else {}
    labels = table.get("num_labels")
    if isinstance(labels, int) and labels > MOST_LABELS:  # Transformers gives each a name
        raise InputError(f"there are {shown(labels)} labels", fix=f"at most {MOST_LABELS:,} are read")
    try:
        config = cls.config_class.from_dict(table, **options)
        check_depth(max(found for each in DEPTHS if isinstance(found := getattr(config, each, 0), int)), most_layers)
        model = cls(config, add_pooling_layer=False) if extras.get("pooler") is False else cls(config)
        if "generation" in extras:
            model.generation_config = type(model.generation_config).from_dict(extras["generation"])
    except InputError:
        raise
    except Exception as error:  # whatever a class does with a value that it does not expect
        what = f"Transformers cannot build the model: {type(error).__name__}: {error}"
        raise InputError(what, fix="restore the file") from error
    return model


def _class(name: Any, home: str) -> Any:
    """The public class of Transformers with this name, if it is defined in the module `home`; otherwise None."""
    if home not in HOMES or not isinstance(name, str):
        return None
    try:
        found = getattr(importlib.import_module("transformers"), name, None)
    except ImportError:
        raise InputError("this model needs Transformers, which is not installed", fix="pip install transformers") from None
    return found if isinstance(found, type) and found.__module__ == home and hasattr(found, "config_class") else None
