"""What a run can start from: another run, a bare model written by `kl.save`, or a Hugging Face model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kilolayer.config import Table, table_of
from kilolayer.errors import InputError
from kilolayer.files.paths import kind_of, storable
from kilolayer.files.saved_tensors import SavedTensors
from kilolayer.huggingface.imported import Imported
from kilolayer.models.config import ModelConfig
from kilolayer.models.model import Model
from kilolayer.models.pretrained_folder import is_foreign
from kilolayer.models.saved import CONFIG as SAVED_CONFIG
from kilolayer.models.saved import is_saved, load_model
from kilolayer.models.token_rows import TABLES
from kilolayer.runs.foreign_vocabulary import ForeignVocabulary, read_vocabulary
from kilolayer.runs.run import Run
from kilolayer.tasks.registry import Registration, get
from kilolayer.tasks.task import Vocabulary


class Origin(Protocol):
    """What `train.start_from` refers to."""

    @property
    def folder(self) -> Path: ...

    @property
    def model(self) -> ModelConfig:
        """The configuration of the model that the weights belong to."""
        ...

    @property
    def tables(self) -> Table:
        """The [model] and [tokenizer] tables of a configuration."""
        ...

    def check_task(self, task: Registration) -> None:
        """Raise if the task cannot start from this."""
        ...

    def vocabulary(self) -> Vocabulary | None:
        """The vocabulary that the weights were trained with; None if it is not known."""
        ...

    def weights(self, vocabulary: Vocabulary | None, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights, for a model with this vocabulary; own: the tensors of the model that receives them."""
        ...

    def saved(self, vocabulary: Vocabulary | None) -> SavedTensors | None:
        """What `weights` returns, each tensor read when it is asked for; None if they are computed from what is saved."""
        ...


def open_origin(folder: Path) -> Origin:
    """Open the run or the model in a folder."""
    folder = storable(folder)
    if kind_of(folder / SAVED_CONFIG) != "file" and is_foreign(folder):
        return ForeignOrigin(Imported.open(folder))
    if is_saved(folder):
        return SavedOrigin(folder)
    return RunOrigin(Run.open(folder))


@dataclass(frozen=True)
class RunOrigin:
    """A Kilolayer run."""

    run: Run

    @property
    def folder(self) -> Path:
        return self.run.folder

    @property
    def model(self) -> ModelConfig:
        return self.run.config.model

    @property
    def tables(self) -> Table:
        return self.run.config.table()

    def check_task(self, task: Registration) -> None:
        known = [task, *map(get, task.load().starts_from)]
        if self.run.registration.name not in [each.name for each in known]:
            raise InputError(
                f"{task.title} cannot start from {self.run.registration.title}",
                where=f"train.start_from: {self.folder}",
                fix=f"name a run that is {' or '.join(each.title for each in known)}",
            )

    def vocabulary(self) -> Vocabulary | None:
        return self.run.vocabulary()

    def weights(self, vocabulary: Vocabulary | None, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.run.weights(self._known(vocabulary))

    def saved(self, vocabulary: Vocabulary | None) -> SavedTensors | None:
        return self.run.saved_weights(self._known(vocabulary))

    def _known(self, vocabulary: Vocabulary | None) -> Vocabulary | None:
        """The vocabulary to compare with the run's: a task without one takes only what does not depend on one."""
        return self.run.vocabulary() if vocabulary is None else vocabulary


@dataclass(frozen=True)
class SavedOrigin:
    """A bare model written by `kl.save`. It has no vocabulary: the configuration decides what its tokens mean."""

    folder: Path

    @cached_property
    def loaded(self) -> Model:
        return load_model(self.folder, dtype=torch.float32)

    @property
    def model(self) -> ModelConfig:
        return self.loaded.config

    @property
    def tables(self) -> Table:
        """Without the padding id, which the task decides."""
        return {"model": {name: value for name, value in table_of(self.model).items() if name != "pad_id"}}

    def check_task(self, task: Registration) -> None:
        _check_shape(self, task, "a saved model")

    def vocabulary(self) -> None:
        return None

    def weights(self, vocabulary: Vocabulary | None, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.loaded.state_dict()

    def saved(self, vocabulary: Vocabulary | None) -> None:
        return None


def _check_shape(origin: Origin, task: Registration, what: str) -> None:
    if task.load_config().brings_model():
        raise InputError(
            f"{task.title} cannot start from {what} which is a Transformer",
            where=f"train.start_from: {origin.folder}",
            fix="name a run of the same task",
        )
    shape, trained = origin.model.shape, task.load_config().shape
    if trained not in (None, shape):
        raise InputError(
            f"{task.title} cannot start from {what} of the shape {shape!r}",
            where=f"train.start_from: {origin.folder}",
            fix=f"name one with the shape {trained!r}, or choose another task",
        )


@dataclass(frozen=True)
class ForeignOrigin:
    """A Hugging Face folder; its tokens, if it reads any, are renumbered in our order."""

    imported: Imported

    @property
    def folder(self) -> Path:
        return self.imported.folder

    @cached_property
    def tokens(self) -> ForeignVocabulary | None:
        """The vocabulary's files, and the table rows of its tokens; None if the model reads images."""
        return read_vocabulary(self.imported) if self.imported.config.image is None else None

    @property
    def model(self) -> ModelConfig:
        """The imported model's configuration, with our token ids."""
        return self.imported.config if self.tokens is None else self.tokens.renumbered(self.imported.config)

    @property
    def tables(self) -> Table:
        return {"model": table_of(self.model), **({} if self.tokens is None else {"tokenizer": self.tokens.table})}

    def check_task(self, task: Registration) -> None:
        _check_shape(self, task, f"a model of the type {self.imported.form.model_type!r},")

    def vocabulary(self) -> Vocabulary | None:
        return None if self.tokens is None else self.tokens.load()

    def weights(self, vocabulary: Vocabulary | None, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tensors = self.imported.weights()
        if self.tokens is not None:
            tensors |= {name: _renumbered(tensors[name], self.tokens.rows) for name in TABLES if name in tensors}
        tensors |= {name: tensor for name, tensor in self.imported.spare_weights().items() if name in own}
        # A file may have lower precision than the model that is trained.
        return {name: tensor.to(own[name].dtype if name in own else torch.float32) for name, tensor in tensors.items()}

    def saved(self, vocabulary: Vocabulary | None) -> None:
        return None


def _renumbered(table: Tensor, rows: Sequence[int | None]) -> Tensor:
    """The rows of a table in our order; zeros where there is none."""
    indices = torch.tensor([-1 if row is None else row for row in rows])
    renumbered = table[indices.clamp(min=0)]
    renumbered[indices < 0] = 0
    return renumbered
