"""The known tasks: those in this folder, and user-defined ones, by name or as `module:Class`.

This module is imported before torch, to show the help; a task's code is imported only when it is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from kilolayer.errors import InputError, OptionError, shown
from kilolayer.importing import Registry, import_class

DEFAULT = "translation"
"""The task of a configuration that does not name one."""
EMBEDDED = Path(__file__).parent / DEFAULT / "quickstart.toml"
"""The default configuration, which trains on generated data."""


@dataclass(frozen=True)
class Verb:
    """A subcommand. home: the module with its `configure` and `run`.

    part: what a task adds to a home that several tasks share, such as `kilolayer.cli.classify`: a module with `add_flags`, and
    the function that the home calls for a run of this task.
    """

    summary: str
    home: str
    part: str = ""


@dataclass(frozen=True)
class Headline:
    """The main score of a run: its key in scores.json and in validations, its title and its format."""

    key: str
    title: str
    digits: int
    larger_is_better: bool = True


def score_digits(key: str, headline: Headline | None) -> int:
    """The decimals of a score in scores.json that does not specify them: two, or more if it is a headline that has more."""
    return max(2, headline.digits) if headline is not None and headline.key == key else 2


@dataclass(frozen=True)
class Samples:
    """How samples.json is shown. parts: the keys of a sample, with their titles; line: the format of a sample on a terminal.

    compared: the keys of the reference and of the model's output, if the report should mark the words in which they differ.
    """

    title: str
    parts: Mapping[str, str]
    line: str
    compared: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Registration:
    """What is known about a task before its code is imported.

    name: its name in configurations; by default the path of its class, `my_module:MyTask`, which is also the default of `task`.
    summary: what it learns, in one line. title: what its runs are called. usage: how to use a run, with {} for its folder.
    config, task: `module:Class` of its configuration and of the task. verbs: subcommands that it adds.
    evaluation: the module that adds flags to `kilolayer evaluate`; without one, `evaluate` shows the scores of the test set.
    unit: what the loss is averaged over and the training speed counts.
    run: `module:Class` of what `kl.load` returns, a subclass of `kl.TrainedRun`.
    report: `module:Class` of what it adds to the report of a run, a subclass of `kilolayer.report.task_report.TaskReport`.
    export: `module:Class` of what it adds to an exported folder, a subclass of `kilolayer.huggingface.task_export.TaskExport`.
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
    report: str = "kilolayer.report.task_report:TaskReport"
    export: str = "kilolayer.huggingface.task_export:TaskExport"

    def load_config(self) -> Any:
        """Import the class of the task's configuration, a subclass of `RunConfig`."""
        return import_class(self.config, "task")

    def load(self) -> Any:
        """Import the task's class, a subclass of `Task`."""
        return import_class(self.task, "task")

    def load_run(self) -> Any:
        """Import the Python class of its runs, a subclass of `TrainedRun`."""
        return import_class(self.run, "task")

    def load_report(self) -> Any:
        """Import what it adds to the report of a run, a subclass of `TaskReport`."""
        return import_class(self.report, "task")

    def load_export(self) -> Any:
        """Import what it adds to an exported folder, a subclass of `TaskExport`."""
        return import_class(self.export, "task")


_registry: Registry[Registration] = Registry("task", lambda task: task.task, 'Registration(name="...", ...)')
AnyTask = TypeVar("AnyTask", bound=Registration | type)


def register(task: AnyTask) -> AnyTask:
    """Register a task by name: give its registration, or use this as a decorator on a class that has a `registration`.

    Registering the same task again replaces it, as when a notebook cell is run twice; the name of another task is refused.
    """
    own = task if isinstance(task, Registration) else _of_class(task, f"{task.__module__}:{task.__qualname__}")
    _registry.add(own.name, own)
    return task


def names() -> list[str]:
    """The names of all registered tasks, sorted."""
    return sorted(_registry)


def get(name: str) -> Registration:
    """The task with this name, or with the class path `my_module:MyTask`; an unknown name raises with the nearest one."""
    if not isinstance(name, str):  # a file may contain any value
        raise OptionError(f"task is {shown(name)}", fix=f"allowed: {', '.join(names())}, or my_module:MyTask")
    return _registry.find(name, _of_class)


def all_of() -> list[Registration]:
    """All registered tasks: the default first, then the built-in ones, then those of users."""
    return sorted(_registry.values(), key=lambda each: (each.name != DEFAULT, not is_built_in(each), each.name))


@contextmanager
def including(tasks: Iterable[Registration]) -> Iterator[None]:
    """A context in which these tasks are registered too."""
    added = {task.name: task for task in tasks if task.name not in _registry}
    _registry.update(added)
    try:
        yield
    finally:
        for name in added:
            _registry.pop(name, None)


def _of_class(cls: Any, path: str) -> Registration:
    """The registration of a class; its name and task default to the class's path."""
    found = getattr(cls, "registration", None)
    if not isinstance(found, Registration):
        raise InputError(
            f"{shown(path)} is not a task",
            where="task",
            fix="name a class that extends kilolayer.tasks.Task, with `registration = kilolayer.tasks.Registration(...)`",
        )
    return replace(found, name=found.name or path, task=found.task or path)


def is_built_in(registration: Registration) -> bool:
    """Whether a task is one of those in this folder."""
    return registration.task.startswith(f"{__name__.rpartition('.')[0]}.")
