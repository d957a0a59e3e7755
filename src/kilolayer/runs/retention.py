"""Decides which checkpoints of a run stay on disk."""

from __future__ import annotations

import logging
from pathlib import Path

from kilolayer.errors import InputError, file_fault
from kilolayer.files.tensors import Expected
from kilolayer.parallel.peers import Peers
from kilolayer.runs import checkpoint

logger = logging.getLogger(__name__)


class Inspector:
    """Checks checkpoints and remembers the results, because hashing them takes long."""

    def __init__(self, expected: Expected | None = None) -> None:
        """expected: what the files of weights can hold."""
        self.expected = expected
        self.known: dict[Path, str | None] = {}
        self.reported: set[Path] = set()

    def find_fault(self, path: Path) -> str | None:
        """`checkpoint.find_fault`, with the result cached."""
        if path not in self.known:
            self.known[path] = checkpoint.find_fault(path, self.expected)
        return self.known[path]

    def find_fault_anew(self, path: Path, group: Peers | None = None) -> str | None:
        """`checkpoint.find_fault` of a checkpoint that was rewritten; group: as there."""
        self.reported.discard(path)
        self.known[path] = checkpoint.find_fault(path, self.expected, group)
        return self.known[path]

    def is_regular(self, path: Path) -> bool | None:
        """Whether a complete checkpoint is on the run's schedule; None, with a warning, if it is damaged or cannot be read.

        Such a checkpoint is neither counted nor deleted, since something may be recovered from it.
        """
        try:
            fault = self.find_fault(path)
            if fault is None:
                return checkpoint.is_scheduled(path)
            fault = f"is damaged ({fault})"
        except InputError as error:
            fault = f"cannot be used ({error.where}: {error.what})"
        if path not in self.reported:
            self.reported.add(path)
            logger.warning("checkpoint of step %d %s: it is not counted and not deleted", checkpoint.step_of(path), fault)
        return None


def prune(folder: Path, keep: int, also: set[int], inspector: Inspector | None = None) -> None:
    """Delete all but the newest `keep` checkpoints and those of the steps `also`; call it after a verified save.

    An extra checkpoint that a stop left is kept as long as it is the newest, and is not counted.
    """
    for leftover in folder.glob(".step-*"):  # left by a process that was killed while writing or deleting
        checkpoint.remove(leftover)
    inspector = inspector or Inspector()
    whole = {path: regular for path in checkpoint.steps(folder) if (regular := inspector.is_regular(path)) is not None}
    regular = [path for path in whole if whole[path]]
    stay = {*regular[-keep:], *list(whole)[-1:], *(path for path in regular if checkpoint.step_of(path) in also)}
    for path in whole.keys() - stay:
        _delete(path)


def _delete(path: Path) -> None:
    # Renamed first, so that an interrupted deletion leaves no folder that looks like a checkpoint.
    doomed = path.with_name(f".{path.name}.deleted")
    try:
        path.rename(doomed)
    except OSError as error:
        logger.warning("checkpoint of step %d cannot be deleted: %s", checkpoint.step_of(path), file_fault(error)[0])
        return
    checkpoint.remove(doomed)
