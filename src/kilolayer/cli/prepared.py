"""A configuration with its data, for verbs that look at what a run would be and leave no run behind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kilolayer.cli.configuration import read
from kilolayer.config import load, merge, overrides

if TYPE_CHECKING:
    from kilolayer.tasks.config import RunConfig
    from kilolayer.tasks.task import Task


def prepared(path: Path, typed: list[str]) -> tuple[RunConfig, Task]:
    """The configuration of a file, with typed options, as its task resolves it, and the task."""
    from kilolayer.tasks.config import RunConfig
    from kilolayer.training.run import cache_folder, prepare
    from kilolayer.training.start import find_start

    start, below = find_start(merge(load(path), overrides(typed)))
    config = read(RunConfig, path, typed, below)
    # The same table is the same vocabulary, also on other text.
    same = start is not None and getattr(start.config, "tokenizer", None) == getattr(config, "tokenizer", None)
    task = prepare(config, cache_folder(), start.vocabulary() if start is not None and same else None)
    return task.resolve(config), task
