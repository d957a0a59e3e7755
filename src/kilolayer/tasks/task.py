"""What training asks of a task. A task binds data, model, loss and scores; the loop knows nothing else of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from torch import Tensor

from kilolayer.data.held_out import HeldOut
from kilolayer.errors import InputError
from kilolayer.models.outputs import DecoderOutput, EncoderDecoderOutput, EncoderOutput
from kilolayer.speed.recorder import Recorder
from kilolayer.tasks import registry
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.other_text import OtherText
from kilolayer.tasks.registry import Registration

ModelOutput = EncoderOutput | DecoderOutput | EncoderDecoderOutput
Config = TypeVar("Config", bound=RunConfig)


class Batch(Protocol):
    """The input of a step."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Tensors of few fixed shapes, in the order that the task's loss takes them."""
        ...

    @property
    def tokens(self) -> int:
        """Labels that count, at least 1: the weight of the batch's mean loss."""
        ...


class Batches(Protocol):
    """Endless batches of few fixed shapes, with a position that can be saved."""

    @property
    def epoch(self) -> int:
        """Which one the next batch belongs to, unless the last of it was read."""
        ...

    @property
    def index(self) -> int:
        """Batches of the epoch that were read."""
        ...

    @property
    def summary(self) -> str:
        """What was read, and how it is batched, for the log."""
        ...

    def __next__(self) -> Batch: ...

    def skip(self) -> None:
        """Pass over the next batch without reading it."""
        ...

    def __len__(self) -> int:
        """Batches in the current epoch."""
        ...

    def state(self) -> dict[str, int | str]:
        """The position, as JSON holds it."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position."""
        ...


class Validation(Protocol):
    """What a validation found; its text is a line of the log."""

    @property
    def quality(self) -> float:
        """What the best checkpoint is chosen by: the larger, the better."""
        ...

    def metrics(self) -> dict[str, Any]:
        """The same for metrics.jsonl: the mean loss of a token, `loss`, and what the task adds."""
        ...


class Vocabulary(Protocol):
    """What a run keeps of its vocabulary."""

    @property
    def digest(self) -> str:
        """What tells it apart from all others."""
        ...

    def save(self, folder: Path) -> None:
        """Write its files, if it has any."""
        ...


@dataclass(frozen=True)
class Loss:
    """The loss of a batch, summed over `count` labels; total: what is differentiated, nll: what is told. All are tensors [].

    output: the model's, of which training takes the loss of its routers, and the norms of its layers.
    """

    total: Tensor
    nll: Tensor
    count: Tensor
    output: ModelOutput


@dataclass(frozen=True)
class Answers:
    """What should have been written for the test part, and what a run has written, a line each."""

    references: list[str]
    hypotheses: list[str]


class Task(ABC, Generic[Config]):
    """The data of a run, ready to train, to validate and to test on. A `model` has the shape that the task trains.

    A class of your own also has `registration`, so that a configuration can name it: `task = "my_module:MyTask"`.
    """

    registration: ClassVar[Registration]
    starts_from: ClassVar[tuple[str, ...]] = ()
    """Tasks besides its own whose runs it can start from: `train.start_from`."""

    @classmethod
    @abstractmethod
    def prepare(cls, config: Config, cache: Path, vocabulary: Any = None) -> Self:
        """Find the data and, unless a run has its own, make the vocabulary: what is wrong with them shows now.

        cache: the folder for what is made of the data, and kept by its content.
        """

    @classmethod
    @abstractmethod
    def load_vocabulary(cls, config: Config, folder: Path) -> Vocabulary:
        """The vocabulary that a run keeps in its folder."""

    @classmethod
    def answers(cls, config: Config, folder: Path, cache: Path) -> Answers | None:
        """What a run has left of its test, for comparisons; None where it has left no lines that can be scored."""
        return None

    @classmethod
    def read_text(
        cls, config: Config, vocabulary: Any, text: OtherText, cache: Path
    ) -> Callable[[Any], dict[str, dict[str, Any]]]:
        """Read a text besides the run's own, and check it; what comes back scores a model on it.

        The scores are tables as in scores.json, one for each part of the text, and nothing is written.
        """
        title = registry.get(config.task).title
        raise InputError(f"{title} is scored on its own test set only", where="--test", fix="give its task read_text")

    @property
    @abstractmethod
    def vocabulary(self) -> Vocabulary:
        """What the run keeps."""

    @abstractmethod
    def resolve(self, config: Config) -> Config:
        """The configuration with nothing implicit left: what the data decide of the model, absolute paths."""

    @abstractmethod
    def training_batches(self, seed: int) -> Batches:
        """Endless shuffled batches; seed and data alone decide their order."""

    @abstractmethod
    def loss(self, model: Any, parts: Sequence[Tensor], *, hidden_states: bool) -> Loss:
        """The loss of a batch's parts; hidden_states: ask the model for them too. It reads nothing back from the device."""

    @abstractmethod
    def model_inputs(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...] | Mapping[str, Tensor]:
        """What the model is called with, in its order or by name: a recipe may be calibrated on it.

        Rows that only fill up a batch are left out.
        """

    @abstractmethod
    def validate(self, model: Any, most: int, recorder: Recorder | None = None) -> Validation | None:
        """The model on the validation part, of which the first `most` pairs, windows or examples count; None without one.

        recorder: runs the forward and the loss of each batch; kept from one validation to the next.
        """

    @abstractmethod
    def score(self, model: Any, folder: Path, weights: Mapping[str, Any] | None = None) -> None:
        """Leave the scores of the test part, scores.json, and samples of what the model does in a run's folder.

        weights: which of the run's checkpoints the model is, for scores.json.
        """

    def held_out(self) -> HeldOut:
        """What tells the validation and the test part from others: a run that goes on notices where they have changed."""
        return HeldOut()

    def frequency_loss(self) -> float | None:
        """Nats a label of the training part under the frequencies of its labels: what is learned without reading the input.

        None where the labels are nothing to be counted.
        """
        return None

    def adopt(self, weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a run to start from, as this task's model takes them; own: those that it has by itself."""
        return dict(weights)
