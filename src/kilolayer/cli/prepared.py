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
    from kilolayer.tasks.config import RunConfig
    from kilolayer.tasks.task import Task


@contextmanager
def prepared(path: Path, typed: list[str], device: str = "auto") -> Iterator[tuple[RunConfig, Task]]:
    """The configuration as resolved by its task, and its data; the embedded corpus is kept in a temporary folder.

    device: where to compute; auto: the configuration's own. A device that this machine does not have is refused before any
    work.
    """
    from kilolayer.data.grammar import write_corpus
    from kilolayer.training.run import cache_folder, choose_device, prepare
    from kilolayer.training.start import read_started, vocabulary_of

    with TemporaryDirectory() as folder:
        is_embedded = path == registry.EMBEDDED
        config, start = read_started(read_tables(path, typed), {"data": {"folder": folder}} if is_embedded else None)
        choose_device(config.train.device if device == "auto" else device)
        if is_embedded:
            write_corpus(Path(folder))
        task = prepare(config, cache_folder(), vocabulary_of(start, config))
        yield task.resolve(config), task
