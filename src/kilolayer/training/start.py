"""What a configuration starts from (`train.start_from`), and the values that it inherits from there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kilolayer.config import Table, build, merge
from kilolayer.data.tokenizer import TokenizerConfig
from kilolayer.errors import InputError, KilolayerError
from kilolayer.precedence import Given
from kilolayer.tasks import registry
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.task import Vocabulary
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training.cpu_model import cpu_model
from kilolayer.training.origins import Origin, RunOrigin, open_origin


def find_start(given: Mapping[str, Any]) -> tuple[Origin | None, Table]:
    """What `train.start_from` in the tables `given` refers to, and the tables it provides as defaults: model and vocabulary.

    Without a start, the defaults are those of a run on a CPU.
    """
    train = given.get("train")
    place = train.get("start_from") if isinstance(train, dict) else None
    if not isinstance(place, str) or place == "none":
        return None, cpu_model(given)
    TrainConfig(start_from=place)  # raises if the value cannot be a path
    task = registry.get(given.get("task", registry.DEFAULT))
    start = open_origin(Path(place))
    start.check_task(task)
    try:
        below = task.load_config().from_start(start.tables)
    except InputError as error:
        raise error.at(f"train.start_from: {start.folder}") from None
    if _other_vocabulary(given.get("tokenizer"), below.get("tokenizer")):
        raise other_vocabulary(start)
    return start, below


def read_started(given: Given, below: Table | None = None) -> tuple[RunConfig, Origin | None]:
    """The configuration, with the values of its start and of `below` as defaults; and that start."""
    start, taken = find_start(given.merged)
    return given.build(RunConfig, {**taken, **(below or {})}), start


def started_config(given: Table) -> RunConfig:
    """The configuration of these tables, with the values of its start as defaults."""
    return build(RunConfig, merge(find_start(given)[1], given))


def start_of(config: RunConfig) -> Origin | None:
    """What a configuration starts from; None: new weights."""
    return None if config.train.start_from is None else open_origin(Path(config.train.start_from))


def vocabulary_of(start: Origin | None, config: RunConfig) -> Vocabulary | None:
    """The start's vocabulary, if the configuration has the same [tokenizer] table, whatever text it is used on."""
    if start is None:
        return None
    table = start.tables.get("tokenizer")
    theirs = None if table is None else build(TokenizerConfig, table)
    return start.vocabulary() if theirs == getattr(config, "tokenizer", None) else None


def other_vocabulary(start: Origin) -> InputError:
    """The error for a vocabulary that differs from the start's."""
    written = f", or write it as in {start.folder / 'config.toml'}" if isinstance(start, RunOrigin) else ""
    return InputError(
        f"the vocabulary is not that of the {'run' if isinstance(start, RunOrigin) else 'model'} to start from",
        where="tokenizer",
        fix=f"remove [tokenizer]{written}: the run then uses that vocabulary",
    )


def _other_vocabulary(given: object, below: object) -> bool:
    """Whether a table asks for another vocabulary than the one below it; one that is read from a file may be the same."""
    if not isinstance(given, dict) or not isinstance(below, dict) or "path" in given:
        return False
    try:
        return build(TokenizerConfig, merge(below, given)) != build(TokenizerConfig, below)
    except KilolayerError:
        # A value that is no vocabulary at all is refused when the whole configuration is read.
        return "path" in below
