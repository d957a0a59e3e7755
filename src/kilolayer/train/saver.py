"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import copy
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from kilolayer.train import checkpoint
from kilolayer.train.checkpoint import Checkpoint


class Saver:
    """Keeps the newest `keep` checkpoints of a run in `folder`, and its best.

    Training waits until its tensors are copied to the processor's memory, and for a checkpoint that is still being written.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self.thread = ThreadPoolExecutor(1)
        self.writing: Future[None] | None = None

    def save(self, state: Checkpoint, best: int | None) -> None:
        """Copy what is to be saved, and begin to write it; best: the step whose checkpoint stays."""
        self.wait()
        copied = Checkpoint(state.step, _copied(state.model), _copied(state.optimizer), copy.deepcopy(state.state))
        self.writing = self.thread.submit(self._write, copied, best)

    def check(self) -> None:
        """Raise what the last save failed with, if it has failed by now."""
        if self.writing is not None and self.writing.done():
            self.wait()

    def wait(self) -> None:
        """Until the last save is done; raise what it failed with."""
        if self.writing is not None:
            writing, self.writing = self.writing, None
            writing.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.thread.shutdown()
        if error is None:
            self.wait()

    def _write(self, state: Checkpoint, best: int | None) -> None:
        path = checkpoint.save(self.folder, state)
        if checkpoint.find_fault(path) is None:
            checkpoint.prune(self.folder, self.keep, set() if best is None else {best})


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
