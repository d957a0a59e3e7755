"""The run that a configuration starts from, and what it gives where the configuration says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kilolayer.config import Given, Table, build, merge
from kilolayer.data.tokenizer import TokenizerConfig
from kilolayer.errors import InputError, KilolayerError
from kilolayer.files.paths import storable
from kilolayer.tasks import registry
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.task import Vocabulary
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training.run import Run


def find_start(given: Mapping[str, Any]) -> tuple[Run | None, Table]:
    """The run that `train.start_from` of the tables `given` names, and what lies below them: its model and vocabulary."""
    train = given.get("train")
    place = train.get("start_from") if isinstance(train, dict) else None
    if not isinstance(place, str) or place == "none":
        return None, {}
    TrainConfig(start_from=place)  # refuses a text that is no path
    task = registry.get(given.get("task", registry.DEFAULT))
    start = Run.open(storable(Path(place)))
    known = [task, *map(registry.get, task.load().starts_from)]
    if start.registration.name not in [each.name for each in known]:
        raise InputError(
            f"{task.title} cannot start from {start.registration.title}",
            where=f"train.start_from: {start.folder}",
            fix=f"name a run that is {' or '.join(each.title for each in known)}",
        )
    below = task.load_config().from_start(start.config)
    if _other_vocabulary(given.get("tokenizer"), below.get("tokenizer")):
        raise other_vocabulary(start)
    return start, below


def read_started(given: Given, below: Table | None = None) -> tuple[RunConfig, Run | None]:
    """The configuration over what it takes of the run to start from and over `below`; and that run."""
    start, taken = find_start(given.merged)
    return given.build(RunConfig, {**taken, **(below or {})}), start


def started_config(given: Table) -> RunConfig:
    """The configuration of these tables, over what it takes of the run to start from."""
    return build(RunConfig, merge(find_start(given)[1], given))


def vocabulary_of(start: Run | None, config: RunConfig) -> Vocabulary | None:
    """That of the run to start from, where the configuration has the same table: it is the same on other text too."""
    if start is None or getattr(start.config, "tokenizer", None) != getattr(config, "tokenizer", None):
        return None
    return start.vocabulary()


def other_vocabulary(start: Run) -> InputError:
    """The error where the vocabulary is not that of the run to start from."""
    return InputError(
        "the vocabulary is not that of the run to start from",
        where="tokenizer",
        fix=f"remove [tokenizer], or write it as in {start.folder / 'config.toml'}: the run then takes that vocabulary",
    )


def _other_vocabulary(given: object, below: object) -> bool:
    """Whether a table asks for another vocabulary than the one below it; one that is read from a file may be the same."""
    if not isinstance(given, dict) or not isinstance(below, dict) or "path" in given:
        return False
    try:
        return build(TokenizerConfig, merge(below, given)) != build(TokenizerConfig, below)
    except KilolayerError:
        return False  # refused where all of the configuration is read
