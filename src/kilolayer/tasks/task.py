"""What training asks of a task. A task binds text, model, loss and score; the loop knows nothing else of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from kilolayer.models.config import ModelConfig
from kilolayer.speed.recorder import Recorder


class Batch(Protocol):
    """The input of a step."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """What the model is called with, in its order, and last the labels: int64 [rows, length], 0 where there is none."""
        ...

    @property
    def tokens(self) -> int:
        """Labels that count: the weight of the batch's mean loss."""
        ...


class Batches(Protocol):
    """Endless batches of few fixed shapes, with a position that can be saved."""

    epoch: int
    index: int

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


class Task(Protocol):
    """The data of a run, ready to train, to validate and to test on. A `model` has the shape that the task trains."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    def fit(self, model: ModelConfig) -> ModelConfig:
        """The model's configuration with what the data decide: the size of the vocabulary."""
        ...

    def resolve(self) -> dict[str, Any]:
        """The tables of the run's configuration that name the data, with nothing implicit left."""
        ...

    def training_batches(self, seed: int) -> Batches:
        """Endless shuffled batches; seed and text alone decide their order."""
        ...

    def validate(self, model: Any, most: int, recorder: Recorder | None = None) -> Validation | None:
        """The model on the validation part, of which the first `most` pairs or windows count; None where there is none.

        recorder: runs the forward and the loss of each batch; kept from one validation to the next.
        """
        ...

    def score(self, model: Any, folder: Path, weights: Mapping[str, Any] | None = None) -> None:
        """Leave the scores of the test part, scores.json, and samples of what the model writes in a run's folder.

        weights: which of the run's checkpoints the model is, for scores.json.
        """
        ...
