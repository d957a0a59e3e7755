"""The known optimizers: those in `rules/`, those of users, by name or as `module:Class`, and the classes of torch.optim.

This module is imported before torch; the code of an optimizer is imported only when it is needed.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from kilolayer.config import build
from kilolayer.errors import InputError, OptionError, shown
from kilolayer.importing import Registry
from kilolayer.optimizers import rules

if TYPE_CHECKING:
    from kilolayer.optimizers.base import UpdateRule

DEFAULT = "adam"

AnyRule = TypeVar("AnyRule", bound="type[UpdateRule]")
_registry: Registry[type[UpdateRule]] = Registry(
    "optimizer",
    rename='name = "..." in the class',
    modules={module.name: f"{rules.__name__}.{module.name}" for module in pkgutil.iter_modules(rules.__path__)},
)


def register(cls: AnyRule) -> AnyRule:
    """Decorator: register an update rule by its name. Registering a class again replaces it, as in a notebook run twice.

    A class that is not yet a dataclass becomes a frozen one, so that its fields are options. A name that another class already
    has is refused.
    """
    made = _checked(cls, _registry.path(cls) if isinstance(cls, type) else cls)
    _registry.add(made.name, made)
    return made


def names() -> list[str]:
    """The names of all optimizers, sorted."""
    return _registry.names()


def find(name: str) -> type[UpdateRule]:
    """The class of an optimizer, by its name or as `my_module:MyRule` or `torch.optim:SGD`.

    The error for an unknown name suggests the nearest one.
    """
    return _registry.find(name, _checked)


def get(name: str, /, **options: Any) -> UpdateRule:
    """The optimizer `name` with these options: `get("adamw", weight_decay=0.1)`."""
    return build(find(name), options, where=f"optimizer {name}")


def chosen(value: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name and the own options of an optimizer in the forms that configurations hold: a name, or a table."""
    if isinstance(value, str):
        return value, {}
    name = value.get("name", DEFAULT)
    if not isinstance(name, str):
        raise OptionError(f"optimizer is {shown(value)}", fix='give a name, or a table with name = "..." and options')
    return name, {key: each for key, each in value.items() if key != "name"}


def own_options(rule: UpdateRule) -> dict[str, Any]:
    """The options of a rule with their values."""
    return {field.name: getattr(rule, field.name) for field in fields(rule)}


def _checked(cls: Any, path: Any) -> Any:
    """The class as a frozen dataclass of options; a class of torch.optim is wrapped. Raises if it is not an optimizer."""
    from kilolayer.optimizers.base import UpdateRule
    from kilolayer.optimizers.torch_rule import is_torch_class, rule_of

    if is_torch_class(cls):
        return rule_of(cls, str(path))
    if not (inspect.isclass(cls) and issubclass(cls, UpdateRule)):
        fix = "name a class that extends kilolayer.optimizers.UpdateRule or torch.optim.Optimizer"
        raise InputError(f"{shown(path)} is not an optimizer", where="optimizer", fix=fix)
    if all(getattr(cls, name) is getattr(UpdateRule, name) for name in ("direction", "update", "rule_for")):
        fix = "write direction(self, gradient, weight, state, count): what the learning rate multiplies"
        raise InputError(f"the optimizer {shown(path)} has no direction method", where="optimizer", fix=fix)
    return cls if "__dataclass_fields__" in vars(cls) else dataclass(frozen=True)(cls)
