"""Writes checkpoints in the background while training continues."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from kilolayer.parallel.collectives import on_all
from kilolayer.parallel.processes import Processes
from kilolayer.runs import checkpoint
from kilolayer.runs.checkpoint import Checkpoint
from kilolayer.runs.last_saved import record_saved
from kilolayer.runs.retention import Inspector, prune

logger = logging.getLogger(__name__)


class Saver:
    """Keeps the newest `keep` checkpoints of a run in `folder`, and the best one.

    Training waits only while its tensors are copied to CPU memory, and for the previous checkpoint to be written. inspector:
    remembers which checkpoints were verified. processes: those that each write a part of every checkpoint, and all call the
    same methods; None: this one writes all.
    """

    def __init__(self, folder: Path, keep: int, inspector: Inspector | None = None, processes: Processes | None = None) -> None:
        self.folder, self.keep, self.inspector = folder, keep, inspector or Inspector()
        self.processes = processes or Processes()
        self.group = self.processes.for_thread()
        self.writing: _Writing | None = None

    def save(self, state: Checkpoint, best: int | None) -> None:
        """Copy the state and start writing it; best: the step of the best checkpoint, which is kept."""
        self.wait()
        tensors = {"model": _copied(state.model), "optimizer": _copied(state.optimizer)}
        copied = replace(state, **tensors, state=copy.deepcopy(state.state))
        self.writing = _Writing(self, copied, set() if best is None else {best})
        self.writing.start()

    def check(self) -> None:
        """Raise the error of the last save, if it has failed by now on all processes."""
        if self.writing is not None and not self.processes.largest(self.writing.is_alive()):
            self.wait()

    def wait(self) -> None:
        """Wait until the last save is done; raise its error if it failed."""
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
        elif not isinstance(error, KeyboardInterrupt):  # a second interrupt does not wait; an incomplete checkpoint is ignored
            try:
                self.wait()
            except Exception as fault:
                error.add_note(f"Also, {fault}")


class _Writing(threading.Thread):
    """Writes one checkpoint and deletes those that are no longer kept; a daemon thread."""

    def __init__(self, saver: Saver, state: Checkpoint, also: set[int]) -> None:
        super().__init__(daemon=True)
        self.saver, self.state, self.also = saver, state, also
        self.fault: Exception | None = None

    def run(self) -> None:
        folder, inspector, group = self.saver.folder, self.saver.inspector, self.saver.group
        try:
            path = checkpoint.save(folder, self.state, group)
            fault = inspector.find_fault_anew(path, group)
            on_all(partial(self._finish, fault), group)
        except Exception as fault:
            self.fault = fault

    def _finish(self, fault: str | None) -> None:
        """On the first process: record what has been written, and delete what it replaces."""
        folder, step = self.saver.folder, self.state.step
        if not self.saver.processes.first:
            return
        if fault is None:
            record_saved(folder, step)
            prune(folder, self.saver.keep, self.also, self.saver.inspector)
        else:
            logger.warning("checkpoint of step %d is damaged as it is written (%s)", step, fault)


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
