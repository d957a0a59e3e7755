"""The tasks that are known: those of this folder, and those of users, by name or as `module:Class`.

What stands here is read before torch is imported, for the help; a task's code is imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from kilolayer.errors import InputError, OptionError, shown, unknown
from kilolayer.importing import import_class

DEFAULT = "translation"
"""The task of a configuration that names none."""
EMBEDDED = Path(__file__).parent / "translation" / "quickstart.toml"
"""The configuration that is trained where none is named, on a corpus that is made for it."""


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
    """How samples.json is shown. parts: the keys of a sample, with their titles; line: one sample on a terminal.

    compared: of these, what was asked for and what the model gave, where the report marks the words in which they differ.
    """

    title: str
    parts: Mapping[str, str]
    line: str
    compared: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Registration:
    """What is known of a task before its code is imported.

    name: by which configurations name it; without one, that of its class, `my_module:MyTask`, and so for task.

    summary: what is learned, in a line. title: what a run of it is. usage: how such a run is used, {} its folder. config, task:
    `module:Class` of its configuration and of the task. verbs: words that it adds to the command. evaluation: the module that
    adds flags to `kilolayer evaluate`; without one, `evaluate` shows the scores of the test part. unit: what a loss is the mean
    of, and what the speed of a training counts. run: `module:Class` of what `kl.load` gives, which extends `kl.TrainedRun`.
    """

    name: str = ""
    summary: str
    title: str
    usage: str
    config: str
    task: str = ""
    verbs: Mapping[str, Verb] = field(default_factory=dict)
    evaluation: str | None = None
    headline: Headline | None = None
    samples: Samples | None = None
    unit: str = "token"
    run: str = "kilolayer.runs.trained_run:TrainedRun"

    def load_config(self) -> Any:
        """The class of the task's configuration, which extends `RunConfig`."""
        return import_class(self.config, "task")

    def load(self) -> Any:
        """The task's class, which extends `Task`."""
        return import_class(self.task, "task")

    def load_run(self) -> Any:
        """The class of its runs in Python, which extends `TrainedRun`."""
        return import_class(self.run, "task")


_registry: dict[str, Registration] = {}


AnyTask = TypeVar("AnyTask", bound=Registration | type)


def register(task: AnyTask) -> AnyTask:
    """Make a task known by its name: by its registration, or, as a decorator, by its class, which holds one.

    The same task again replaces it, as in a notebook that is run twice; the name of another task is refused.
    """
    own = task if isinstance(task, Registration) else _of_class(task, f"{task.__module__}:{task.__qualname__}")
    before = _registry.get(own.name)
    if before is not None and before.task != own.task:
        owner = "built in" if _is_built_in(before) else f"that of {before.task}"
        raise OptionError(
            f"the task {own.name!r} is {owner}", where=own.task, fix='give yours another name: Registration(name="...", ...)'
        )
    _registry[own.name] = own
    return task


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
        return _of_class(import_class(name, "task"), name)
    raise unknown(name, _registry, kind="task")


def all_of() -> list[Registration]:
    """All tasks that are known, the default first."""
    return sorted(_registry.values(), key=lambda each: (each.name != DEFAULT, each.name))


def _of_class(cls: Any, path: str) -> Registration:
    """The registration that a class holds, its name and task those of the class where it says nothing."""
    found = getattr(cls, "registration", None)
    if not isinstance(found, Registration):
        raise InputError(
            f"{shown(path)} is not a task",
            where="task",
            fix="name a class that extends kilolayer.tasks.Task, with `registration = kilolayer.tasks.Registration(...)`",
        )
    return replace(found, name=found.name or path, task=found.task or path)


def _is_built_in(registration: Registration) -> bool:
    return registration.task.startswith(f"{__name__.rpartition('.')[0]}.")
