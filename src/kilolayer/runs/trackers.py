"""Trackers receive the metrics of a run as they are written. TensorBoard is built in; others are user-defined classes."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from kilolayer.config import Table
from kilolayer.errors import InputError, KilolayerError, OptionError, shown
from kilolayer.files.writing import make_folder
from kilolayer.importing import import_class
from kilolayer.tasks.train_config import TrainConfig

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """The interface of a tracker, such as one for Weights & Biases or MLflow. Only the first process of a run has trackers."""

    def start(self, folder: Path, config: Table, step: int) -> None:
        """Called before the first step, and again when the run is resumed; step is then that of its checkpoint.

        folder: the run folder. config: its tables as plain values. A resumed run logs the rows after `step` again.
        """
        ...

    def log(self, row: dict[str, Any]) -> None:
        """Called for each row of metrics.jsonl.

        A row has "kind" ("train", "valid", "layers", "stacks", "routing", "event", "reference"), "step", and values.
        """
        ...

    def finish(self, scores: dict[str, Any] | None) -> None:
        """Called once, at the end. scores: the contents of scores.json; None if training stopped before its end."""
        ...


class TensorBoard:
    """Writes numbers as TensorBoard files, into the folder `tensorboard` of a run."""

    def start(self, folder: Path, config: Table, step: int) -> None:
        """Open the writer; TensorBoard drops the events after this step, which a resumed run writes again."""
        make_folder(folder / "tensorboard")
        self.board = summary_writer()(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, row: dict[str, Any]) -> None:
        """Write each number of a row as a scalar, such as train/loss."""
        for name, value in row.items():
            if name not in ("kind", "step") and isinstance(value, int | float):
                self.board.add_scalar(f"{row['kind']}/{name}", value, row["step"])

    def finish(self, scores: dict[str, Any] | None) -> None:
        """Flush and close the files."""
        self.board.close()


class Guarded:
    """Wraps a tracker so that it cannot end a run: if it raises, this is logged once and the tracker is no longer called.

    Nothing is passed to it before its start or after its finish.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.tracker, self.name = tracker, type(tracker).__qualname__
        self.running = False

    def start(self, folder: Path, config: Table, step: int) -> None:
        """A KilolayerError, which says what to do, is passed on, since nothing has been trained yet."""
        self.running = True
        self._call("start", folder, config, step)

    def log(self, row: dict[str, Any]) -> None:
        """Pass on a copy of the row, which the tracker may change."""
        if self.running:
            self._call("log", dict(row))

    def finish(self, scores: dict[str, Any] | None) -> None:
        """Only the first call has an effect."""
        if self.running:
            self._call("finish", scores)
            self.running = False

    def _call(self, method: str, *arguments: Any) -> None:
        try:
            getattr(self.tracker, method)(*arguments)
        except Exception as error:
            self.running = False
            if method == "start" and isinstance(error, KilolayerError):
                raise
            frame = traceback.extract_tb(error.__traceback__)[-1]
            logger.warning(
                "the tracker %s failed in `%s` and is left out; training continues: %s: %s (%s, line %s)",
                *(self.name, method, type(error).__name__, error, frame.filename, frame.lineno),
            )


def guarded(trackers: Sequence[Tracker]) -> list[Guarded]:
    """Wrap the trackers so that none of them can end a run."""
    return [each if isinstance(each, Guarded) else Guarded(each) for each in trackers]


def make_trackers(config: TrainConfig, given: Sequence[Tracker] = ()) -> list[Guarded]:
    """The trackers of a run: those that its configuration names, then those given as objects."""
    named = find_trackers(config).items()
    return guarded([*(_create_tracker(name, make) for name, make in named), *given])


def find_trackers(config: TrainConfig) -> dict[str, Callable[[], Any]]:
    """The class or function that makes each tracker in a configuration; one that cannot be imported raises."""
    found: dict[str, Callable[[], Any]] = {}
    if config.tensorboard:
        summary_writer()
        found["train.tensorboard"] = TensorBoard
    return found | {path: import_class(path, "train.trackers") for path in config.trackers}


def _create_tracker(path: str, make: Callable[[], Any]) -> Tracker:
    try:
        tracker = make()
    except Exception as error:
        raise InputError(
            f"the tracker cannot be created: {type(error).__name__}: {error}",
            where=f"train.trackers: {path}",
            fix="a tracker's class is called without arguments",
        ) from error
    check_tracker(tracker, f"train.trackers: {path}")
    return tracker


def check_tracker(tracker: Any, where: str) -> None:
    """Raise if this cannot be a tracker: a class instead of an object, or an object that lacks a method."""
    absent = [name for name in ("start", "log", "finish") if not callable(getattr(tracker, name, None))]
    if absent or isinstance(tracker, type):
        raise InputError(
            f"this is not a tracker: it {f'has no {absent[0]}' if absent else 'is a class'}: {shown(tracker)}",
            where=where,
            fix="give an object with start(folder, config, step), log(row) and finish(scores)",
        )


def summary_writer() -> Any:
    """TensorBoard's writer class; raises if the package is missing."""
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        raise OptionError(
            "the package tensorboard is not installed",
            where="train.tensorboard",
            fix="pip install tensorboard, or set it to false",
        ) from None
    return SummaryWriter
