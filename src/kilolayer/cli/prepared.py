"""A configuration with what it starts from and its data, for verbs that look at what a run would be and leave none behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from kilolayer.cli.configuration import given
from kilolayer.tasks import registry

if TYPE_CHECKING:
    from kilolayer.tasks.config import RunConfig
    from kilolayer.tasks.task import Task


@contextmanager
def prepared(path: Path, typed: list[str], device: str = "auto") -> Iterator[tuple[RunConfig, Task]]:
    """The configuration as its task resolves it, and its data; those of the embedded default lie in a folder that goes away.

    device: where it computes; auto is the configuration's own. One that this machine does not have is refused before any work.
    """
    from kilolayer.data.grammar import write_corpus
    from kilolayer.training.run import cache_folder, choose_device, prepare
    from kilolayer.training.start import read_started, vocabulary_of

    with TemporaryDirectory() as folder:
        is_embedded = path == registry.EMBEDDED
        config, start = read_started(given(path, typed), {"data": {"folder": folder}} if is_embedded else None)
        choose_device(config.train.device if device == "auto" else device)
        if is_embedded:
            write_corpus(Path(folder))
        task = prepare(config, cache_folder(), vocabulary_of(start, config))
        yield task.resolve(config), task
