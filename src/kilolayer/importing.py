"""What a configuration names: things that are registered under a name, and classes by their module, `my_module:MyRecipe`."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from kilolayer.errors import InputError, OptionError, shown, unknown

CLASS_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


Item = TypeVar("Item")


class Registry(dict[str, Item], Generic[Item]):
    """Things of one kind by their names.

    kind: what they are called in errors, such as "recipe". path: gives the path of one, `module:Class`. rename: how to
    give one another name. modules: those of which each registers the item of its name, imported when that is asked for.
    """

    def __init__(
        self,
        kind: str,
        path: Callable[[Any], str] = lambda cls: f"{cls.__module__}:{cls.__qualname__}",
        rename: str = "",
        modules: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.kind, self.path, self.rename, self.modules = kind, path, rename, dict(modules or {})

    def names(self) -> list[str]:
        """All names, sorted; nothing is imported."""
        return sorted({*self, *self.modules})

    def add(self, name: str, item: Item) -> Item:
        """Register an item. The same one again replaces it, as when a notebook cell is run twice; another one is refused."""
        self._import(name)
        path, before = self.path(item), self.path(self[name]) if name in self else None
        if before not in (None, path):
            owner = "built in" if before.startswith(f"{__name__.partition('.')[0]}.") else f"that of {before}"
            fix = f"give yours another name: {self.rename}"
            raise OptionError(f"the {self.kind} {name!r} is {owner}", where=path, fix=fix)
        self[name] = item
        return item

    def find(self, name: str, of_class: Callable[[Any, str], Item] | None = None) -> Item:
        """The item with this name; the error for an unknown name suggests the nearest one.

        of_class: makes an item from a class and its path, so that `my_module:MyClass` is a name too.
        """
        self._import(name)
        if name in self:
            return self[name]
        if of_class is not None and ":" in name:
            return of_class(import_class(name, self.kind), name)
        error = unknown(name, self.names(), kind=self.kind)
        own = "" if of_class is None else "; or a class of yours: my_module:MyClass"
        raise type(error)(error.what, fix=error.fix + own)

    def copy(self) -> Registry[Item]:
        """A registry with the same items."""
        made = Registry[Item](self.kind, self.path, self.rename, self.modules)
        made.update(self)
        return made

    def _import(self, name: str) -> None:
        if name in self.modules and name not in self:
            importlib.import_module(self.modules[name])


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
