"""What a configuration starts from (`train.start_from`), and the values that it inherits from there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kilolayer.config import RawConfig, Table, build, merge
from kilolayer.data.tokenizer import TokenizerConfig
from kilolayer.errors import InputError, KilolayerError
from kilolayer.runs.origins import Origin, RunOrigin, open_origin
from kilolayer.runs.run import choose_device
from kilolayer.tasks import registry
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.task import Vocabulary
from kilolayer.tasks.train_config import TrainConfig

WIDTHS = {"dim": 128, "heads": 4, "ffn_dim": 256}
LAYERS = 6
NOTE = (
    f"[model] gives no widths, and this machine trains on a CPU: dim is {WIDTHS['dim']}, heads {WIDTHS['heads']} and ffn_dim "
    f"{WIDTHS['ffn_dim']}, with {LAYERS} layers in each stack if no depth is given either; on a GPU the defaults are larger"
)


def cpu_model(given: Mapping[str, Any]) -> Table:
    """The defaults of [model] for the tables of a run; empty if they or their task set a width, if the task
    brings a model of its own, or if it trains on a GPU."""
    train = given.get("train")
    device = train.get("device", "auto") if isinstance(train, Mapping) else "auto"
    try:
        if RunConfig.choose(given).brings_model():
            return {}
        model = merge(RunConfig.choose(given).defaults(given), given).get("model", {})
    except KilolayerError:
        return {}  # the caller that builds the configuration reports what is wrong, and where
    if not isinstance(model, Mapping) or {*WIDTHS, "kv_heads"} & set(model) or device not in ("auto", "cpu"):
        return {}
    if choose_device(device).type != "cpu":
        return {}
    has_depth = {"layers", "encoder_layers", "decoder_layers"} & set(model)
    return {"model": {**WIDTHS, **({} if has_depth else {"layers": LAYERS})}}


def find_start(given: Mapping[str, Any]) -> tuple[Origin | None, Table]:
    """What `train.start_from` in the tables `given` refers to, and the tables it provides as defaults: model and vocabulary.

    Without a start, the defaults are those of a run on a CPU.
    """
    train = given.get("train")
    source = train.get("start_from") if isinstance(train, dict) else None
    if not isinstance(source, str) or source == "none":
        return None, cpu_model(given)
    TrainConfig(start_from=source)  # raises if the value cannot be a path
    task = registry.get(given.get("task", registry.DEFAULT))
    start = open_origin(Path(source))
    start.check_task(task)
    try:
        below = task.load_config().from_start(start.tables)
    except InputError as error:
        raise error.at(f"train.start_from: {start.folder}") from None
    if _other_vocabulary(given.get("tokenizer"), below.get("tokenizer")):
        raise other_vocabulary(start)
    return start, below


def read_started(given: RawConfig, below: Table | None = None) -> tuple[RunConfig, Origin | None]:
    """The configuration, with the values of its start and of `below` as defaults; and that start."""
    start, taken = find_start(given.merged)
    return given.build(RunConfig, {**taken, **(below or {})}), start


def started_config(given: Table, *sources: str) -> RunConfig:
    """The configuration of these tables, with the values of its start as defaults. sources: what errors call the tables."""
    return read_started(RawConfig(given, {}, sources))[0]


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
        return "path" in below or _is_vocabulary(given)


def _is_vocabulary(table: Table) -> bool:
    """Whether a table is right by itself; a value that is no vocabulary at all is refused when all tables are read."""
    try:
        build(TokenizerConfig, table)
    except KilolayerError:
        return False
    return True
