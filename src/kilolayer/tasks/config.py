"""The configuration of a run: the tables that all tasks share. A task extends it by its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from kilolayer.config import Table, check, merge, option_places, table_of
from kilolayer.errors import OptionError, shown
from kilolayer.models.config import ModelConfig, Shape
from kilolayer.tasks import registry
from kilolayer.tasks.train_config import TrainConfig

Fault = tuple[bool, str, str, str]
"""Whether it is there; what, where, and what to do."""


@dataclass(frozen=True)
class UsualBatch:
    """A batch as a task trains on it: sequences, tokens a sequence and side; beam: hypotheses of its search.

    scored: positions of a sequence that the vocabulary is scored at, where these are fewer than `length`.
    """

    rows: int
    length: int
    beam: int = 1
    scored: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a run is made from, one table a room. Built from a table, it is the class of the table's task."""

    shape: ClassVar[Shape | None] = None
    """Of the models that the task trains; None: of any."""

    task: str = registry.DEFAULT
    """What the model learns: one of the tasks below, or a class of your own, my_module:MyTask."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Shape, depth and recipe."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Steps, optimizer, schedule."""

    @classmethod
    def choose(cls, table: Mapping[str, Any]) -> type[Self]:
        """The class that reads this table: that of its task."""
        chosen = registry.get(table.get("task", registry.DEFAULT)).load_config()
        return chosen if issubclass(chosen, cls) else cls

    @classmethod
    def complete(cls, table: Mapping[str, Any]) -> Mapping[str, Any]:
        """The table over what the task needs where the table says nothing; a table of another task is refused."""
        own = set(option_places(cls))
        for place in _places(table):
            if not own & {place, *_above(place)}:
                _refuse_foreign(place, table.get("task", registry.DEFAULT))
        shape: Table = {} if cls.shape is None else {"model": {"shape": cls.shape}}
        return merge(merge(shape, cls.defaults(table)), table)

    @classmethod
    def defaults(cls, table: Mapping[str, Any]) -> Table:
        """What the task lays under a table."""
        return {}

    @classmethod
    def from_start(cls, tables: Table) -> Table:
        """What a run takes of the tables of what it starts from, where its own configuration says nothing."""
        return {name: tables[name] for name in ("model", "tokenizer") if name in tables}

    def __post_init__(self) -> None:
        check(self)
        if self.train.freeze == "experts" and self.model.moe is None:
            raise OptionError('freeze = "experts" has no effect on a model without experts', where="train", fix="remove it")
        if self.train.freeze == "experts" and self.train.start_from is None:
            raise OptionError(
                'freeze = "experts" would freeze untrained experts',
                where="train",
                fix="name a trained run: train.start_from",
            )
        title, shape = registry.get(self.task).title, self.model.shape
        if self.shape is not None and shape != self.shape:
            others = [each.name for each in registry.all_of() if each.load_config().shape == shape]
            fixes = ["remove model.shape", *(f'set task = "{name}"' for name in others)]
            raise OptionError(f"{title} cannot be trained in the shape {shape!r}", where="model", fix=", or ".join(fixes))
        for wrong, what, where, fix in self.faults():
            if wrong:
                raise OptionError(what, where=where, fix=fix)

    def faults(self) -> Iterator[Fault]:
        """What contradicts itself, or has no effect."""
        yield from ()

    def table(self) -> Table:
        """The tables as plain values."""
        return table_of(self)

    def usual_batch(self, length: int | None) -> UsualBatch:
        """For the plan: a batch of sequences of `length` tokens, or of the task's own length."""
        return UsualBatch(64, length or 64)

    def check_sharing(self) -> None:
        """Refuse what cannot be done while several processes share the experts."""


def _places(table: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Where each value of a table stands: `model.recipe.name`."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _places(value, f"{above}{name}.")
        else:
            yield f"{above}{name}"


def _above(place: str) -> Iterator[str]:
    """`model` and `model.recipe` of `model.recipe.name`."""
    parts = place.split(".")
    yield from (".".join(parts[:count]) for count in range(1, len(parts)))


def _refuse_foreign(place: str, task: str) -> None:
    """Raise where an option is one of another task."""
    for other in registry.all_of():
        if place in option_places(other.load_config()):
            raise OptionError(
                f"{place} has no effect on the task {shown(task)}",
                where=place.rpartition(".")[0],
                fix=f'remove it, or set task = "{other.name}"',
            )
