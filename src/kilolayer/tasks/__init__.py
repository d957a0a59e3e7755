"""A task binds data, model, loss and scores: one folder a task, each of which registers itself when it is imported.

`kilolayer.tasks.register` makes a task of your own known; see docs/tasks.md.
"""

import importlib
import pkgutil

from kilolayer.tasks.registry import DEFAULT, Headline, Registration, Samples, Verb, get, names, register

for _module in pkgutil.iter_modules(__path__):
    if _module.ispkg:
        importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["DEFAULT", "Headline", "Registration", "Samples", "Verb", "get", "names", "register"]
