"""Imports classes that a configuration names by their module: `my_module:MyRecipe`."""

from __future__ import annotations

import importlib
import re
from typing import Any

from kilolayer.errors import InputError, OptionError, shown

CLASS_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def import_class(path: str, kind: str) -> Any:
    """The class that `path` names, `module:Class`; kind: what it should be, "task" or "recipe", for errors.

    Modules are looked up only on the Python path.
    """
    if not CLASS_PATH.fullmatch(path):
        raise OptionError(
            f"{kind} is {shown(path)}",
            fix=f"a {kind} of your own is named by its module and class: my_module:My{kind.title()}",
        )
    module, _, name = path.partition(":")
    try:
        imported = importlib.import_module(module)
    except Exception as error:
        if module.partition(".")[0] == __name__.partition(".")[0]:
            raise
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            what = f"there is no module {shown(error.name)}"
            fix = "modules are looked for on the Python path: install it, or set PYTHONPATH to its folder"
        else:
            what = f"the module {module!r} cannot be imported: {type(error).__name__}: {error}"
            fix = f'fix it: python -c "import {module}" shows where it fails'
        raise InputError(what, where=f"{kind} {shown(path)}", fix=fix) from error
    if not hasattr(imported, name):
        raise InputError(f"the module {module!r} has no {name!r}", where=kind, fix="name a class of it: module:Class")
    return getattr(imported, name)


def class_path(cls: type) -> str | None:
    """The path of a class by which another process can import it; None if it is in a notebook, a script or a function."""
    path = f"{cls.__module__}:{cls.__qualname__}"
    return path if cls.__module__ != "__main__" and CLASS_PATH.fullmatch(path) else None
