"""Which checkpoints of a run stay on disk."""

from __future__ import annotations

import logging
from pathlib import Path

from kilolayer.errors import InputError, file_fault
from kilolayer.training import checkpoint

logger = logging.getLogger(__name__)


class Inspector:
    """Finds the faults of checkpoints, of each once: hashing them takes long."""

    def __init__(self) -> None:
        self.known: dict[Path, str | None] = {}
        self.told: set[Path] = set()

    def find_fault(self, path: Path) -> str | None:
        """As `checkpoint.find_fault`, from memory where it is known."""
        if path not in self.known:
            self.known[path] = checkpoint.find_fault(path)
        return self.known[path]

    def forget(self, path: Path) -> None:
        """Look again: the checkpoint was written anew."""
        self.known.pop(path, None)
        self.told.discard(path)

    def is_regular(self, path: Path) -> bool | None:
        """Whether a whole checkpoint is on the run's schedule; None, with a line in the log, where it is not known to be whole.

        Such a one is neither counted nor deleted: something may be saved from it.
        """
        try:
            fault = self.find_fault(path)
            if fault is None:
                return checkpoint.is_scheduled(path)
            fault = f"is damaged ({fault})"
        except InputError as error:
            fault = f"cannot be used ({error.where}: {error.what})"
        if path not in self.told:
            self.told.add(path)
            logger.warning("checkpoint of step %d %s: it is not counted and not deleted", checkpoint.step_of(path), fault)
        return None


def prune(folder: Path, keep: int, also: set[int], inspector: Inspector | None = None) -> None:
    """Delete all but the newest `keep` checkpoints and those of the steps `also`; called after a verified save.

    One that a stop added to the schedule stays while it is the newest, and counts nowhere else.
    """
    for leftover in folder.glob(".step-*"):  # of a process that was killed as it wrote or deleted
        checkpoint.remove(leftover)
    inspector = inspector or Inspector()
    whole = {path: regular for path in checkpoint.steps(folder) if (regular := inspector.is_regular(path)) is not None}
    regular = [path for path in whole if whole[path]]
    stay = {*regular[-keep:], *list(whole)[-1:], *(path for path in regular if checkpoint.step_of(path) in also)}
    for path in whole.keys() - stay:
        _delete(path)


def _delete(path: Path) -> None:
    # Renamed first: a delete that is cut short leaves no folder that looks like a checkpoint.
    doomed = path.with_name(f".{path.name}.deleted")
    try:
        path.rename(doomed)
    except OSError as error:
        logger.warning("checkpoint of step %d cannot be deleted: %s", checkpoint.step_of(path), file_fault(error)[0])
        return
    checkpoint.remove(doomed)
