"""The registered norms: those in this folder and those of users, by name or as `module:Class`. Imports no torch."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, TypeVar

from kilolayer.errors import OptionError, shown, unknown
from kilolayer.importing import CLASS_PATH, import_class

NO_NORMS = {"__init__", "base", "registry"}
"""The files of this folder that define no norm."""

AnyNorm = TypeVar("AnyNorm", bound=type)
_norms: dict[str, type] = {}


def register_norm(cls: AnyNorm) -> AnyNorm:
    """Decorator: register a norm by its attribute `name`, which in this folder is the name of its file."""
    name: str = vars(cls)["name"]
    before = _norms.get(name)
    if before is not None and (before.__module__, before.__qualname__) != (cls.__module__, cls.__qualname__):
        owner = f"{before.__module__}:{before.__qualname__}"
        raise OptionError(f"the norm {name!r} is that of {owner}", fix='give yours another name: name = "..." in the class')
    _norms[name] = cls
    return cls


def norm_names() -> list[str]:
    """The names of all norms, sorted; the files of norms are not imported."""
    files = {path.stem for path in Path(__file__).parent.glob("*.py")} - NO_NORMS
    return sorted(files | set(_norms))


def check_norm_name(name: Any) -> None:
    """Raise an error if no norm has this name and it is not the path of a class."""
    if isinstance(name, str) and (name in _norms or CLASS_PATH.fullmatch(name)):
        return
    if name not in norm_names():
        own = "or name a class of your own: my_module:MyNorm"
        if not isinstance(name, str):
            raise OptionError(f"norm is {shown(name)}", fix=f"valid: {', '.join(norm_names())}; {own}")
        raise unknown(name, norm_names(), kind="norm", where="norm")


def find_norm(name: str) -> type:
    """The class of a norm, by its name or as `my_module:MyNorm`."""
    check_norm_name(name)
    if name not in _norms:
        if ":" in name:
            return import_class(name, "norm")
        importlib.import_module(f"{__name__.rpartition('.')[0]}.{name}")
    return _norms[name]
