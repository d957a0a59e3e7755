"""The tasks that are known: those of this folder, and those of users, by name or as `module:Class`.

What stands here is read before torch is imported, for the help; a task's code is imported when it is asked for.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kilolayer.errors import InputError, OptionError, shown, unknown

DEFAULT = "translation"
"""The task of a configuration that names none."""
EMBEDDED = Path(__file__).parent / "translation" / "quickstart.toml"
"""The configuration that is trained where none is named, on a corpus that is made for it."""
PLACE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class Verb:
    """A word of the command. home: the module with its `configure` and `run`."""

    summary: str
    home: str


@dataclass(frozen=True)
class Headline:
    """The score that a run is told by: its key in scores.json and in validations."""

    key: str
    title: str
    digits: int
    larger_is_better: bool = True


@dataclass(frozen=True)
class Samples:
    """How samples.json is shown. parts: the keys of a sample, with their titles; line: one sample on a terminal."""

    title: str
    parts: Mapping[str, str]
    line: str


@dataclass(frozen=True)
class Registration:
    """What is known of a task before its code is imported.

    summary: what is learned, in a line. title: what a run of it is. usage: how such a run is used, {} its folder. config, task:
    `module:Class` of its configuration and of the task. verbs: words that it adds to the command. evaluation: the module that
    adds flags to `kilolayer evaluate`; without one, `evaluate` shows the scores of the test part. unit: what a loss is the mean
    of, and what the speed of a training counts. run: `module:Class` of what `kl.load` gives, which extends `kl.TrainedRun`.
    """

    name: str
    summary: str
    title: str
    usage: str
    config: str
    task: str
    verbs: Mapping[str, Verb] = field(default_factory=dict)
    evaluation: str | None = None
    headline: Headline | None = None
    samples: Samples | None = None
    unit: str = "token"
    run: str = "kilolayer.runs.trained_run:TrainedRun"

    def load_config(self) -> Any:
        """The class of the task's configuration, which extends `RunConfig`."""
        return imported(self.config)

    def load(self) -> Any:
        """The task's class, which extends `Task`."""
        return imported(self.task)

    def load_run(self) -> Any:
        """The class of its runs in Python, which extends `TrainedRun`."""
        return imported(self.run)


_registry: dict[str, Registration] = {}


def register(registration: Registration) -> Registration:
    """Make a task known by its name; the same name again replaces it, as in a notebook that is run twice."""
    _registry[registration.name] = registration
    return registration


def names() -> list[str]:
    """Of all tasks that are known, sorted."""
    return sorted(_registry)


def get(name: str) -> Registration:
    """A task by its name, or a user's class by its place, `my_module:MyTask`; an unknown name raises with the nearest one."""
    if not isinstance(name, str):  # a file may hold anything
        raise OptionError(f"task is {shown(name)}", fix=f"allowed: {', '.join(names())}, or my_module:MyTask")
    if name in _registry:
        return _registry[name]
    if ":" in name:
        return _of_place(name)
    raise unknown(name, _registry, kind="task")


def all_of() -> list[Registration]:
    """All tasks that are known, the default first."""
    return sorted(_registry.values(), key=lambda each: (each.name != DEFAULT, each.name))


def _of_place(place: str) -> Registration:
    """The registration that a user's class holds."""
    if not PLACE.fullmatch(place):
        raise OptionError(
            f"task is {shown(place)}", fix="a task of your own is named by its module and class: my_module:MyTask"
        )
    found = getattr(imported(place), "registration", None)
    if not isinstance(found, Registration):
        raise InputError(
            f"{shown(place)} is no task",
            where="task",
            fix="name a class that extends kilolayer.tasks.task.Task, with `registration`",
        )
    return found


def imported(place: str, kind: str = "task") -> Any:
    """What a place names, `module:Name`; kind: what it is to be, for the errors."""
    module, _, name = place.partition(":")
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
            fix = f'mend it: python -c "import {module}" tells where it fails'
        raise InputError(what, where=f"{kind} {shown(place)}", fix=fix) from error
    if not hasattr(imported, name):
        raise InputError(f"the module {module!r} has no {name!r}", where=kind, fix="name a class of it: module:Class")
    return getattr(imported, name)
