"""Prepares a configuration with its start and its data, for commands that inspect what a run would be without creating one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from kilolayer.cli.configuration import read_tables
from kilolayer.tasks import registry

if TYPE_CHECKING:
    from kilolayer.runs.origins import Origin
    from kilolayer.tasks.config import RunConfig
    from kilolayer.tasks.task import Task


@contextmanager
def started(path: Path, typed: list[str]) -> Iterator[tuple[RunConfig, Origin | None]]:
    """The configuration of a run, and what it starts from; the embedded data are in a temporary folder meanwhile."""
    from kilolayer.runs.start import read_started
    from kilolayer.tasks.config import RunConfig

    with TemporaryDirectory() as folder:
        is_embedded = path == registry.EMBEDDED
        below = RunConfig.choose({}).embedded(Path(folder)) if is_embedded else None
        config, start = read_started(read_tables(path, typed), below)
        if is_embedded:
            type(config).write_embedded(Path(folder))
        yield config, start


@contextmanager
def prepared(path: Path, typed: list[str], device: str = "auto") -> Iterator[tuple[RunConfig, Task]]:
    """The configuration as resolved by its task, and its data.

    device: where to compute; auto: the configuration's own. A device that this machine does not have is refused before any
    work.
    """
    from kilolayer.runs.run import cache_folder, choose_device, prepare
    from kilolayer.runs.start import vocabulary_of

    with started(path, typed) as (config, start):
        choose_device(config.train.device) if device == "auto" else choose_device(device, "device")
        task = prepare(config, cache_folder(), vocabulary_of(start, config))
        yield task.resolve(config), task
