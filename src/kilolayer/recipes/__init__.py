"""How depth is made trainable: one file a recipe.

Each module in this folder registers its recipe when it is imported; a new recipe is a new file.
"""

import importlib
import pkgutil

from kilolayer.recipes.base import DEFAULT, PLAIN, PLAIN_PRE, find, get, names, parse

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["DEFAULT", "PLAIN", "PLAIN_PRE", "find", "get", "names", "parse"]
