"""Tasks, each of which combines data, a model, a loss and scores. Each has a folder here and registers itself on import.

`kilolayer.tasks.register` adds a user-defined task; see docs/tasks.md. `Task` needs torch and is imported on first use.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from kilolayer.tasks.registry import DEFAULT, Headline, Registration, Samples, Verb, get, names, register

if TYPE_CHECKING:
    from kilolayer.tasks.config import RunConfig as RunConfig
    from kilolayer.tasks.task import Task as Task

for _module in pkgutil.iter_modules(__path__):
    if _module.ispkg:
        importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["DEFAULT", "Headline", "Registration", "RunConfig", "Samples", "Task", "Verb", "get", "names", "register"]

_HOMES = {"RunConfig": "kilolayer.tasks.config", "Task": "kilolayer.tasks.task"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
