"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from kilolayer.training import checkpoint
from kilolayer.training.checkpoint import Checkpoint


class Saver:
    """Keeps the newest `keep` checkpoints of a run in `folder`, and its best.

    Training waits until its tensors are copied to the processor's memory, and for a checkpoint that is still being written.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self.writing: _Writing | None = None

    def save(self, state: Checkpoint, best: int | None) -> None:
        """Copy what is to be saved, and begin to write it; best: the step whose checkpoint stays."""
        self.wait()
        copied = Checkpoint(state.step, _copied(state.model), _copied(state.optimizer), copy.deepcopy(state.state))
        self.writing = _Writing(self.folder, copied, self.keep, set() if best is None else {best})
        self.writing.start()

    def check(self) -> None:
        """Raise what the last save failed with, if it has failed by now."""
        if self.writing is not None and not self.writing.is_alive():
            self.wait()

    def wait(self) -> None:
        """Until the last save is done; raise what it failed with."""
        if self.writing is not None:
            self.writing.join()
            writing, self.writing = self.writing, None
            if writing.fault is not None:
                raise writing.fault

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.wait()
        elif not isinstance(error, KeyboardInterrupt):  # who asks twice does not wait; half a checkpoint is none
            try:
                self.wait()
            except Exception as fault:
                error.add_note(f"Also, {fault}")


class _Writing(threading.Thread):
    """Writes one checkpoint and deletes those that are no longer wanted; ends with the process."""

    def __init__(self, folder: Path, state: Checkpoint, keep: int, also: set[int]) -> None:
        super().__init__(daemon=True)
        self.folder, self.state, self.keep, self.also = folder, state, keep, also
        self.fault: Exception | None = None

    def run(self) -> None:
        try:
            path = checkpoint.save(self.folder, self.state)
            if checkpoint.find_fault(path) is None:
                checkpoint.prune(self.folder, self.keep, self.also)
        except Exception as fault:
            self.fault = fault


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
