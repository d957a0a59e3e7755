"""How deep models are made trainable: one file per recipe.

Each module in this folder registers its recipe when it is imported; a new recipe is a new file. A recipe of your own, in a file
of your own, is a class that extends `Recipe`; see docs/extend.md.
"""

import importlib
import pkgutil

from kilolayer.config import bounded
from kilolayer.recipes.base import (
    NORM,
    Anchor,
    Combination,
    Constants,
    Depths,
    Kind,
    LayerInput,
    Learned,
    NormSpec,
    Part,
    PerLayer,
    Place,
    Plan,
    Rates,
    Recipe,
    RunningSum,
    Side,
    Stream,
    Top,
)
from kilolayer.recipes.registry import DEFAULT, PLAIN, PLAIN_PRE, find, get, names, parse, register
from kilolayer.recipes.role import EVERY_MATRIX, VALUE_PATH, Role

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "DEFAULT",
    "EVERY_MATRIX",
    "NORM",
    "PLAIN",
    "PLAIN_PRE",
    "VALUE_PATH",
    "Anchor",
    "Combination",
    "Constants",
    "Depths",
    "Kind",
    "LayerInput",
    "Learned",
    "NormSpec",
    "Part",
    "PerLayer",
    "Place",
    "Plan",
    "Rates",
    "Recipe",
    "Role",
    "RunningSum",
    "Side",
    "Stream",
    "Top",
    "bounded",
    "find",
    "get",
    "names",
    "parse",
    "register",
]


def __dir__() -> list[str]:
    return sorted(__all__)
