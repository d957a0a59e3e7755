"""The table [model] of a task that brings a model of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kilolayer.config import check

if TYPE_CHECKING:
    from torch import Tensor

    from kilolayer.models.trainable import Trainable


@dataclass(frozen=True, kw_only=True)
class TrainableConfig(ABC):
    """The options of a model that is not one of our Transformers; a frozen dataclass whose fields are the options extends it.

    A run's configuration names it as the type of its field `model`. There are no recipes, stacks of layers or experts: options
    and commands that are about these are refused.
    """

    title: ClassVar[str]
    """What the model is called in logs, plans and reports."""
    moe: ClassVar[None] = None

    def __post_init__(self) -> None:
        check(self)

    @abstractmethod
    def build(self) -> Trainable:
        """A new model with its initial weights, on torch's current default device and from its default generator."""

    @abstractmethod
    def inputs(self, rows: int) -> tuple[Tensor, ...]:
        """Inputs of the model's forward pass for a training batch of this many rows, on the meta device, for the plan."""

    @property
    def widths(self) -> str:
        """The sizes of the model in words, for plans and reports."""
        return ""
