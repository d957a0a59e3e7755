"""Runs the work of a training step or of a validation, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kilolayer.layers.modules import in_mode

Restart = Callable[[], bool]
AroundCapture = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class WorkItem:
    """A piece of work, `function(*inputs)`, that reads nothing back from the device.

    name: distinguishes it from other pieces with inputs of the same shapes; None if it must not be recorded.
    """

    name: Hashable | None
    function: Callable[..., Any]
    inputs: tuple[Tensor, ...] = ()

    @property
    def key(self) -> Hashable:
        """The shape key: one recording can be used for all pieces with the same key."""
        return self.name, *(tuple(each.shape) for each in self.inputs)


class Recorder:
    """Runs work by calling it. A faster recorder may record the work instead, and replay it.

    before_run: called at the beginning of each run. replaying: the piece that was most recently replayed in the last run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before_run: Callable[[], None] | None = None
        self.replaying: WorkItem | None = None

    @property
    def records(self) -> bool:
        """Whether work is recorded."""
        return False

    def run(
        self,
        items: Sequence[WorkItem],
        *,
        gradients: bool = False,
        restart: Restart | None = None,
        around_capture: AroundCapture = nullcontext,
    ) -> Any:
        """Run the items in order; return the result of the last one, which is valid until the next run.

        gradients: the items compute gradients. restart: undoes what the items have done so far, so that they can be run again
        after memory has been freed; returns False if it is too late for that. Without it, they are not run again.
        around_capture: a context that is entered while a piece is captured.
        """
        self.replaying = None
        if self.before_run is not None:
            self.before_run()
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            return self.call(items)

    def call(self, items: Sequence[WorkItem]) -> Any:
        """Call the items in order, with their inputs on the device."""
        result = None
        for item in items:
            result = item.function(*(each.to(self.device, non_blocking=True) for each in item.inputs))
        return result

    def sharing_pool(self, subject: str) -> Recorder:
        """A recorder for other work in the same memory; subject: the beginning of its messages, such as "validation runs"."""
        return Recorder(self.device)

    def drop_if_moved(self, model: nn.Module) -> None:
        """Forget what was recorded if the weights of this model have moved in memory since."""


@contextmanager
def evaluating(
    model: nn.Module, function: Callable[..., Any], recorder: Recorder | None = None
) -> Iterator[Callable[..., Any]]:
    """Evaluation mode, in which `function`, of tensors, is run by the recorder, or by a plain one.

    Gives what to call: it takes the function's tensors, on any device. The result is valid until the next call.
    """
    recorder = recorder or Recorder(next(model.parameters()).device)
    recorder.drop_if_moved(model)

    def run(*inputs: Tensor) -> Any:
        return recorder.run([WorkItem(function.__qualname__, function, inputs)], restart=lambda: True)

    with in_mode(model, training=False):
        yield run
