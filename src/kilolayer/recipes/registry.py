"""The registered recipes: those in this folder and those of users, by name or as `module:Class`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from kilolayer.config import build
from kilolayer.errors import InputError, OptionError, shown
from kilolayer.importing import Registry
from kilolayer.recipes.base import WRITE_PLAN, Recipe

DEFAULT = "deepnorm"
PLAIN = "post_ln"  # the recipe of a folded model
PLAIN_PRE = "pre_ln"  # the counterpart with the norm before each function

AnyRecipe = TypeVar("AnyRecipe", bound=type[Recipe])
_registry: Registry[type[Recipe]] = Registry("recipe", rename='name = "..." in the class')


def register(cls: AnyRecipe) -> AnyRecipe:
    """Decorator: register a recipe by its name. Registering a class again replaces it, as in a notebook that is run twice.

    A class that is not yet a dataclass becomes a frozen one, so that its fields are options. A name that another class already
    has is refused.
    """
    made = _checked(cls, _registry.path(cls) if isinstance(cls, type) else cls)
    _registry.add(made.name, made)
    return made


def names() -> list[str]:
    """The names of all recipes, sorted."""
    return sorted(_registry)


def find(name: str) -> type[Recipe]:
    """The class of a recipe, by its name or as `my_module:MyRecipe`; the error for an unknown name suggests the nearest one."""
    return _registry.find(name, _checked)


def get(name: str, /, **options: Any) -> Recipe:
    """The recipe `name` with these options: `get("admin", weight="trainable")`."""
    return build(find(name), options, where=f"recipe {name}")


def parse(value: Any) -> Recipe:
    """A recipe from the forms that configurations hold: a recipe, its name, or a table of its options that includes `name`."""
    match value:
        case Recipe():
            return value
        case str():
            return get(value)
        case {"name": str(name), **options}:
            return get(name, **options)
        case dict() if "name" not in value:
            return get(DEFAULT, **value)
        case _:
            raise OptionError(
                f"recipe is {shown(value)}",
                fix="give a name, a table with `name` and options, or kilolayer.recipes.get(name, option=value)",
            )


def _checked(cls: Any, path: Any) -> Any:
    """The class as a frozen dataclass; raises an error if it is not a recipe."""
    if not (isinstance(cls, type) and issubclass(cls, Recipe)):
        raise InputError(
            f"{shown(path)} is not a recipe", where="recipe", fix="name a class that extends kilolayer.recipes.Recipe"
        )
    if cls.plan is Recipe.plan:
        raise InputError(
            f"the recipe {shown(path)} has no plan method",
            where="recipe",
            fix=WRITE_PLAN,
        )
    return cls if "__dataclass_fields__" in vars(cls) else dataclass(frozen=True)(cls)
