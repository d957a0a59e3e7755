"""Flags of a subcommand that belong to one task: each in a group of its own, and refused for runs of other tasks."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping

from kilolayer.errors import OptionError
from kilolayer.tasks import registry
from kilolayer.tasks.registry import Registration


def add_task_flags(parser: argparse.ArgumentParser, modules: Mapping[str, str]) -> None:
    """Add the flags of each task's module, by the name of the task; they are in `owners` of the parsed options."""
    owners: dict[str, tuple[str, argparse.Action]] = {}
    for name, module in modules.items():
        group = parser.add_argument_group(f"for {registry.get(name).title}")
        importlib.import_module(module).add_flags(group)
        owners |= {action.option_strings[0]: (name, action) for action in group._group_actions}
    parser.set_defaults(owners=owners)


def refuse_foreign_flags(options: argparse.Namespace, task: Registration) -> None:
    """Raise if a flag of another task than that of the run is given."""
    for flag, (owner, action) in options.owners.items():
        if owner != task.name and getattr(options, action.dest) != action.default:
            fix = f"remove it: it applies to {registry.get(owner).title}"
            raise OptionError(f"{flag} has no effect on {task.title}", where=str(options.run), fix=fix)
