"""Names of the last release: each still works, with a warning, until the next."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])


def warn_renamed(old: str, new: str, level: int = 3) -> None:
    """Warn the caller's caller that `old` is now `new`."""
    warnings.warn(f"{old} is now {new}; the old name works until the next release", DeprecationWarning, stacklevel=level)


def renamed_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module: finds its old names. names: old name to new name."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", f"{module}.{names[name]}")
        return getattr(sys.modules[module], names[name])

    return find


def renamed_method(old: str, new: str) -> Any:
    """A method that calls the one with the new name."""

    def call(self: Any, *args: Any, **options: Any) -> Any:
        warn_renamed(f"{type(self).__name__}.{old}", f".{new}")
        return getattr(self, new)(*args, **options)

    return call


def renamed_arguments(**names: str) -> Callable[[Function], Function]:
    """A decorator of a function whose arguments have new names: old name to new name."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            for old in names.keys() & options.keys():
                warn_renamed(f"the argument {old}", names[old])
                options[names[old]] = options.pop(old)
            return function(*args, **options)

        return call  # pyright: ignore[reportReturnType]

    return decorate


def renamed_fields(**names: str) -> Callable[[Class], Class]:
    """A decorator of a dataclass whose fields have new names: old name to new name."""

    def decorate(cls: Class) -> Class:
        cls.__init__ = renamed_arguments(**names)(cls.__init__)
        for old, new in names.items():
            setattr(cls, old, property(functools.partial(_read, old=old, new=new)))
        return cls

    return decorate


def _read(instance: Any, *, old: str, new: str) -> Any:
    warn_renamed(f"{type(instance).__name__}.{old}", f".{new}")
    return getattr(instance, new)
