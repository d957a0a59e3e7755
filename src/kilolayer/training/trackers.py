"""Trackers are given the metrics of a run as they come. TensorBoard is one of them; others are classes of a user's own."""

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
    """What follows a run: Weights & Biases, MLflow, a file of one's own. Of several processes the first alone has trackers."""

    def start(self, folder: Path, config: Table, step: int) -> None:
        """Called before the first step, and again where the run is resumed: step is then that of its checkpoint.

        folder: the run's. config: its tables as plain values. A resumed run logs again what comes after `step`.
        """
        ...

    def log(self, row: dict[str, Any]) -> None:
        """A line of metrics.jsonl: "kind" ("train", "valid", "layers", "routing", "event", "reference"), "step", and values."""
        ...

    def finish(self, scores: dict[str, Any] | None) -> None:
        """Called once, at the end. scores: what scores.json holds; None where training has stopped before its end."""
        ...


class TensorBoard:
    """Numbers as TensorBoard's files, in the folder `tensorboard` of a run."""

    def start(self, folder: Path, config: Table, step: int) -> None:
        """TensorBoard forgets the events after this step: a resumed run writes them again."""
        make_folder(folder / "tensorboard")
        self.board = summary_writer()(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, row: dict[str, Any]) -> None:
        """Each number of a row is a scalar: train/loss."""
        for name, value in row.items():
            if name not in ("kind", "step") and isinstance(value, int | float):
                self.board.add_scalar(f"{row['kind']}/{name}", value, row["step"])

    def finish(self, scores: dict[str, Any] | None) -> None:
        """Write out what is still held back."""
        self.board.close()


class Guarded:
    """A tracker that cannot end a run: one that raises is named in the log, once, and left out from there on.

    Nothing reaches it before its start or after its finish.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.tracker, self.name = tracker, type(tracker).__qualname__
        self.running = False

    def start(self, folder: Path, config: Table, step: int) -> None:
        """An error of ours, which says what to do, is raised: nothing has been trained yet."""
        self.running = True
        self._call("start", folder, config, step)

    def log(self, row: dict[str, Any]) -> None:
        """A copy of the row: what a tracker does to it stays with the tracker."""
        if self.running:
            self._call("log", dict(row))

    def finish(self, scores: dict[str, Any] | None) -> None:
        """The first call counts."""
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
            place = traceback.extract_tb(error.__traceback__)[-1]
            logger.warning(
                "the tracker %s failed in `%s` and is left out; training continues: %s: %s (%s, line %s)",
                *(self.name, method, type(error).__name__, error, place.filename, place.lineno),
            )


def guarded(trackers: Sequence[Tracker]) -> list[Guarded]:
    """The same trackers, none of which can end a run."""
    return [each if isinstance(each, Guarded) else Guarded(each) for each in trackers]


def make_trackers(config: TrainConfig, given: Sequence[Tracker] = ()) -> list[Guarded]:
    """The trackers of a run: those that its configuration names, then those that are given as objects."""
    named = find_trackers(config).items()
    return guarded([*(_made(name, make) for name, make in named), *given])


def find_trackers(config: TrainConfig) -> dict[str, Callable[[], Any]]:
    """What makes each tracker that a configuration names; what cannot be imported is refused."""
    found: dict[str, Callable[[], Any]] = {}
    if config.tensorboard:
        summary_writer()
        found["train.tensorboard"] = TensorBoard
    return found | {place: import_class(place, "train.trackers") for place in config.trackers}


def _made(place: str, make: Callable[[], Any]) -> Tracker:
    try:
        tracker = make()
    except Exception as error:
        raise InputError(
            f"the tracker cannot be created: {type(error).__name__}: {error}",
            where=f"train.trackers: {place}",
            fix="a tracker's class is called without arguments",
        ) from error
    check_tracker(tracker, f"train.trackers: {place}")
    return tracker


def check_tracker(tracker: Any, where: str) -> None:
    """Refuse what cannot follow a run: a class in the place of its object, and what lacks a method."""
    absent = [name for name in ("start", "log", "finish") if not callable(getattr(tracker, name, None))]
    if absent or isinstance(tracker, type):
        raise InputError(
            f"this is not a tracker: it {f'has no {absent[0]}' if absent else 'is a class'}: {shown(tracker)}",
            where=where,
            fix="give an object with start(folder, config, step), log(row) and finish(scores)",
        )


def summary_writer() -> Any:
    """TensorBoard's writer, a class; refuses where the package is missing."""
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        raise OptionError(
            "the package tensorboard is not installed",
            where="train.tensorboard",
            fix="pip install tensorboard, or set it to false",
        ) from None
    return SummaryWriter
