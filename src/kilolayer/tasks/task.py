"""The interface between training and a task: data, model, loss and scores. The training loop knows nothing else about it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from torch import Tensor, no_grad

from kilolayer import hints
from kilolayer.data.held_out import HeldOut
from kilolayer.errors import InputError
from kilolayer.models.outputs import DecoderOutput, EncoderDecoderOutput, EncoderOutput
from kilolayer.runtime.recorder import Recorder
from kilolayer.tasks import registry
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.other_text import OtherText
from kilolayer.tasks.registry import Registration

ModelOutput = EncoderOutput | DecoderOutput | EncoderDecoderOutput
Config = TypeVar("Config", bound=RunConfig)


class Batch(Protocol):
    """The input of a training step."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Tensors of a few fixed shapes, in the order that the task's loss expects."""
        ...

    @property
    def tokens(self) -> int:
        """The number of labels, at least 1: the weight of the batch's mean loss."""
        ...


class Batches(Protocol):
    """Endless batches of a few fixed shapes, with a position that can be saved."""

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, unless the last batch of an epoch has just been read."""
        ...

    @property
    def index(self) -> int:
        """The number of batches read in this epoch."""
        ...

    @property
    def summary(self) -> str:
        """What was read and how it is batched, for the log."""
        ...

    def __next__(self) -> Batch: ...

    def skip(self) -> None:
        """Skip the next batch without reading it."""
        ...

    def __len__(self) -> int:
        """The number of batches in the current epoch."""
        ...

    def state(self) -> dict[str, int | str]:
        """The position, as JSON values."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position."""
        ...


class Validation(Protocol):
    """The result of a validation; its str() is a line of the log."""

    @property
    def quality(self) -> float:
        """The value that the best checkpoint is chosen by; larger is better."""
        ...

    def metrics(self) -> dict[str, Any]:
        """The values for metrics.jsonl: `loss`, the mean loss per token, and what the task adds."""
        ...


class Vocabulary(Protocol):
    """The vocabulary that a run stores."""

    @property
    def digest(self) -> str:
        """A hash that identifies the vocabulary."""
        ...

    def save(self, folder: Path) -> None:
        """Write its files, if it has any."""
        ...


def digest_of(vocabulary: Vocabulary | None) -> str:
    """What a checkpoint stores to identify the vocabulary; empty if there is none."""
    return "" if vocabulary is None else vocabulary.digest


@dataclass(frozen=True)
class Loss:
    """The loss of a batch, summed over `count` labels: total is differentiated, nll is reported. All are tensors [].

    output: the model's output, from which training takes the router losses and the residual norms of the layers. A model of the
    task's own may return anything, which is then given to its `step_sums`.
    """

    total: Tensor
    nll: Tensor
    count: Tensor
    output: Any


@dataclass(frozen=True)
class Answers:
    """The references of the test set and the output of a run, one line each."""

    references: list[str]
    hypotheses: list[str]


@dataclass(frozen=True)
class DeviceWork:
    """What a task does with the parts of a batch on the device before a step; recorded: whether it can be."""

    function: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
    recorded: bool = False

    def __call__(self, *parts: Tensor) -> tuple[Tensor, ...]:
        with no_grad():
            return self.function(parts)


class Task(ABC, Generic[Config]):
    """The data of a run, ready for training, validation and testing. Every `model` argument has the shape that the task trains.

    A user-defined class also has a `registration`, so that a configuration can name it: `task = "my_module:MyTask"`.
    """

    registration: ClassVar[Registration]
    starts_from: ClassVar[tuple[str, ...]] = ()
    """Other tasks whose runs this task can start from with `train.start_from`."""
    records_on_device: ClassVar[bool] = False
    """Whether `on_device` computes all from its tensors and reads none of them back, so that it too can be recorded."""
    notes: Sequence[str] = ()
    """What the log is to say of the data, such as what of it was left out."""

    @classmethod
    @abstractmethod
    def prepare(cls, config: Config, cache: Path, vocabulary: Any = None) -> Self:
        """Find the data and make the vocabulary, if the task has one and none is given, so that errors in either show at once.

        cache: the folder for files derived from the data, which are reused as long as the content is the same. vocabulary: that
        of the run that is resumed, tested or started from; a task without vocabulary is called without this argument.
        """

    @classmethod
    def load_vocabulary(cls, config: Config, folder: Path) -> Vocabulary | None:
        """The vocabulary stored in a run folder; None if the task has none."""
        return None

    @classmethod
    def answers(cls, config: Config, folder: Path, cache: Path) -> Answers | None:
        """The references and the output of a run's test, for comparisons; None if it has no lines that can be scored."""
        return None

    @classmethod
    def read_text(
        cls, config: Config, vocabulary: Any, text: OtherText, cache: Path
    ) -> Callable[[Any], dict[str, dict[str, Any]]]:
        """Read and check a text other than the run's own; returns a function that scores a model on it.

        The scores are tables as in scores.json, one for each part of the text; nothing is written.
        """
        title = registry.get(config.task).title
        raise InputError(
            f"{title} is scored on its own test set only", where=hints.argument("test"), fix="give its task read_text"
        )

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The vocabulary that the run stores; None if the task has none."""
        return None

    @abstractmethod
    def resolve(self, config: Config) -> Config:
        """The configuration with everything explicit: model sizes that depend on the data, and absolute paths."""

    @abstractmethod
    def training_batches(self, seed: int) -> Batches:
        """Endless shuffled batches, whose order depends only on the seed and the data."""

    def on_device(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Change the parts of a training batch on the device where the model is, such as by augmentation; by default, nothing.

        It is called before the step, which may be recorded, and may do what a recorded step cannot. Shapes and dtypes must be
        the same for batches of the same shapes. `loss` and `model_inputs` are given what it returns.
        """
        return parts

    @property
    def device_work(self) -> DeviceWork | None:
        """`on_device`, if the task defines it."""
        return DeviceWork(self.on_device, self.records_on_device) if type(self).on_device is not Task.on_device else None

    @abstractmethod
    def loss(self, model: Any, parts: Sequence[Tensor], *, hidden_states: bool) -> Loss:
        """The loss of a batch's parts, computed without reading from the device; hidden_states: ask the model for them too."""

    def model_inputs(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...] | Mapping[str, Tensor]:
        """The model's inputs from a batch's parts, positional or by name, for recipes that are calibrated on data.

        Rows that only fill up a batch are left out. A task that brings a model of its own does not need it.
        """
        what = "the recipe is calibrated on data, and the task does not say what the model reads of a batch"
        raise InputError(what, where="model.recipe", fix=f"give {type(self).__name__} model_inputs")

    @abstractmethod
    def validate(self, model: Any, most: int, recorder: Recorder | None = None) -> Validation | None:
        """Evaluate the model on at most `most` pairs, windows, examples or images for validation; None if there are none.

        recorder: runs the forward pass and the loss of each batch; it is kept between validations.
        """

    @abstractmethod
    def score(self, model: Any, folder: Path, weights: Mapping[str, Any] | None = None) -> None:
        """Write the scores of the test set (scores.json) and samples of the model's output into a run folder.

        weights: which of the run's checkpoints the model was loaded from, for scores.json.
        """

    def held_out(self) -> HeldOut:
        """Digests of the validation and test sets, by which a resumed run notices that they have changed.

        A run of a task that does not define it says at its start that it cannot notice.
        """
        return HeldOut()

    @property
    def identifies_held_out(self) -> bool:
        """Whether the task defines `held_out`."""
        return type(self).held_out is not Task.held_out

    def frequency_loss(self) -> float | None:
        """The training labels' mean loss in nats under their own frequencies: what can be learned without reading the input.

        None if the labels cannot be counted.
        """
        return None

    def adopt(self, weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the weights of another run to those of this task's model; own: the weights of the new model.

        It is called with tensors of the meta device first, and again with all values if it computes with them.
        """
        return dict(weights)
