"""The configuration of a run: the tables that all tasks share, which each task extends with its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self, get_type_hints

from kilolayer.config import Table, check, merge, option_paths, table_of
from kilolayer.errors import OptionError, shown
from kilolayer.models.config import ModelConfig, Shape
from kilolayer.models.trainable_config import TrainableConfig
from kilolayer.tasks import registry
from kilolayer.tasks.resume_rules import ResumeRules
from kilolayer.tasks.train_config import TrainConfig

Fault = tuple[bool, str, str, str]
"""A possible fault of a configuration: whether it is present, what is wrong, where, and what to do."""


@dataclass(frozen=True)
class UsualBatch:
    """A typical training batch of a task: the number of sequences, and tokens per sequence on each side.

    beam: hypotheses of its search. scored: the positions per sequence at which vocabulary scores are computed, if fewer than
    `length`.
    """

    rows: int
    length: int
    beam: int = 1
    scored: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a run is made from, one table per subject. `build` returns the class of the table's task."""

    shape: ClassVar[Shape | None] = None
    """The shape of the models that the task trains; None: any."""
    resume: ClassVar[ResumeRules] = ResumeRules()
    """Which of the task's own options may change when a run is resumed."""

    task: str = registry.DEFAULT
    """What the model learns: one of the tasks below, or a class of your own, my_module:MyTask."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Shape, depth and recipe."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Steps, optimizer, schedule."""

    @classmethod
    def choose(cls, table: Mapping[str, Any]) -> type[Self]:
        """The class that reads this table: the one of its task."""
        chosen = registry.get(table.get("task", registry.DEFAULT)).load_config()
        return chosen if issubclass(chosen, cls) else cls

    @classmethod
    def complete(cls, table: Mapping[str, Any]) -> Mapping[str, Any]:
        """The table, with the task's defaults for what it does not set; an option of another task is refused."""
        own = set(option_paths(cls))
        for path in _paths(table):
            if not own & {path, *_above(path)}:
                _refuse_foreign(path, table.get("task", registry.DEFAULT))
        shape: Table = {} if cls.shape is None else {"model": {"shape": cls.shape}}
        return merge(merge(shape, cls.defaults(table)), table)

    @classmethod
    def defaults(cls, table: Mapping[str, Any]) -> Table:
        """The task's defaults for a table."""
        return {}

    @classmethod
    def from_start(cls, tables: Table) -> Table:
        """The tables that a run inherits from what it starts from, as defaults; raises if the task cannot start from it."""
        return {name: tables[name] for name in ("model", "tokenizer") if name in tables}

    @classmethod
    def embedded(cls, folder: Path) -> Table:
        """The tables by which the default configuration reads what `write_embedded` writes into a folder."""
        return {}

    @classmethod
    def write_embedded(cls, folder: Path) -> None:
        """Write the data of the default configuration into a folder."""

    def __post_init__(self) -> None:
        check(self)
        self._check_paths()
        if self.train.freeze == "experts" and self.model.moe is None:
            raise OptionError('freeze = "experts" has no effect on a model without experts', where="train", fix="remove it")
        if self.train.freeze == "experts" and self.train.start_from is None:
            raise OptionError(
                'freeze = "experts" would freeze untrained experts',
                where="train",
                fix="name a trained run: train.start_from",
            )
        if self.own_model is None:
            self._check_shape()
        else:
            self._check_own_model()
        for wrong, what, where, fix in self.faults():
            if wrong:
                raise OptionError(what, where=where, fix=fix)

    def _check_paths(self) -> None:
        """An empty path would be the working folder, with every file below it."""
        for path in (*self.resume.files, "tokenizer.path"):
            section, _, name = path.partition(".")
            value = getattr(getattr(self, section, None), name, None)
            if value == "" or (isinstance(value, list) and "" in value):
                raise OptionError(f"{name} is empty", where=section, fix="name a file or a folder, or remove it")

    @property
    def own_model(self) -> TrainableConfig | None:
        """The model that the task brings; None: a Transformer, which [model] describes."""
        return self.model if isinstance(self.model, TrainableConfig) else None

    @classmethod
    def brings_model(cls) -> bool:
        """Whether the task brings a model of its own."""
        return issubclass(cls.model_class(), TrainableConfig)

    @classmethod
    def model_class(cls) -> type[ModelConfig | TrainableConfig]:
        """The class of the table [model]."""
        return get_type_hints(cls)["model"]

    def _check_shape(self) -> None:
        title, shape = registry.get(self.task).title, self.model.shape
        if self.shape is not None and shape != self.shape:
            others = [each.name for each in registry.all_of() if each.load_config().shape == shape]
            fixes = ["remove model.shape", *(f'set task = "{name}"' for name in others)]
            raise OptionError(f"{title} cannot be trained in the shape {shape!r}", where="model", fix=", or ".join(fixes))
        if self.model.multiway is not None and registry.is_built_in(registry.get(self.task)):
            raise OptionError(
                f"{title} reads one modality, and multiway has weights for two", where="model", fix="remove model.multiway"
            )

    def _check_own_model(self) -> None:
        """Set and check the options of training that are about layers: a model of the task's own has none that are known."""
        train = self.train
        automatic = {"precision": "fp32", "layers_every": 0}
        chosen = {name: value for name, value in automatic.items() if getattr(train, name) == "auto"}
        object.__setattr__(self, "train", train := replace(train, **chosen))
        usual = {**automatic, "layer_decay": 1.0, "recompute": "none", "stop_when_dead": False}
        for name, value in usual.items():
            if getattr(train, name) != value:
                what = f"{name} = {shown(getattr(train, name))} has no effect on {registry.get(self.task).title}"
                raise OptionError(f"{what}, a model without known layers", where="train", fix=f"remove {name}")

    def faults(self) -> Iterator[Fault]:
        """Yield the possible contradictions, and the options that may have no effect."""
        yield from ()

    @property
    def usage(self) -> str:
        """How to use a run of it on the command line, with {} for its folder."""
        return registry.get(self.task).usage

    def table(self) -> Table:
        """The tables as plain values."""
        return table_of(self)

    def usual_batch(self, length: int | None) -> UsualBatch:
        """A typical batch for the plan, of sequences of `length` tokens, or of the task's own length."""
        return UsualBatch(64, length or 64)

    def check_sharing(self) -> None:
        """Raise if something is configured that does not work when several processes share the experts or the matrices."""


def _paths(table: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The dotted name of each value in a table: `model.recipe.name`."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _paths(value, f"{above}{name}.")
        else:
            yield f"{above}{name}"


def _above(path: str) -> Iterator[str]:
    """The tables above a dotted name: `model` and `model.recipe` for `model.recipe.name`."""
    parts = path.split(".")
    yield from (".".join(parts[:count]) for count in range(1, len(parts)))


def _refuse_foreign(path: str, task: str) -> None:
    """Raise if the option belongs to another task."""
    for other in registry.all_of():
        if path in option_paths(other.load_config()):
            raise OptionError(
                f"{path} has no effect on the task {shown(task)}",
                where=path.rpartition(".")[0],
                fix=f'remove it, or set task = "{other.name}"',
            )


def part_of(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A nested table; an empty one if the value is not a table, which is refused later."""
    part = table.get(name, {})
    return part if isinstance(part, Mapping) else {}


def usual_training(table: Mapping[str, Any], training: Table, optimizer: Table, epochs: float, warmup: float) -> Table:
    """The defaults of [train] for a table: `training`, and those of an optimizer, a length and a warm-up if it sets none."""
    train = part_of(table, "train")
    found = training | ({} if "optimizer" in train else optimizer)
    found |= {} if "steps" in train else {"epochs": epochs}
    return found | ({} if "warmup_steps" in train else {"warmup_share": warmup})
