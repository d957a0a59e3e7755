"""Recording of a custom training loop's step as a CUDA graph, which is replayed from the third call on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from kilolayer.errors import InputError, OptionError
from kilolayer.layers.modules import tensors_of
from kilolayer.moe.shard import expert_group
from kilolayer.runtime.recorder import WorkItem
from kilolayer.speed.graph import GraphPool
from kilolayer.speed.graph_recorder import GraphRecorder

logger = logging.getLogger(__name__)


def record(step: Callable[..., Any], model: nn.Module, optimizer: Optimizer) -> RecordedStep:
    """Wrap `step` so that on a GPU it is recorded once for each shape of its inputs and then replayed as a CUDA graph.

    step: a function of tensors that performs a whole training step: forward, backward, `optimizer.step()` and
    `optimizer.zero_grad()`. It must not read anything back from the device. A replay runs none of its Python code: what changes
    between steps, such as the learning rate, must be a tensor, and hooks are not called.
    model: the model that it trains, or its fast form.
    optimizer: created with `capturable=True` if it has that option.
    On the CPU, or if recording fails, which is logged, the step runs as usual.
    """
    for what, fits in (
        ("step", callable(step)),
        ("model", isinstance(model, nn.Module)),  # pyright: ignore[reportUnnecessaryIsInstance]
        ("optimizer", isinstance(optimizer, Optimizer)),  # pyright: ignore[reportUnnecessaryIsInstance]
    ):
        if not fits:
            raise InputError(
                f"what is given as {what} is not one", fix="call it like this: kilolayer.record(step, model, optimizer)"
            )
    device = next(model.parameters()).device
    if device.type == "cuda":
        for group in optimizer.param_groups:
            if group.get("capturable") is False:
                raise OptionError("the optimizer cannot be recorded", fix="make it with capturable=True")
    return RecordedStep(step, model, optimizer, _pool(model, device))


def _pool(model: nn.Module, device: torch.device) -> GraphPool | None:
    if device.type != "cuda":
        return None
    if expert_group(model) is not None:
        logger.warning("steps are not recorded, because several processes share the experts")
        return None
    torch.cuda.empty_cache()  # memory freed after building the model belongs to another stream, and no step could reuse it
    return GraphPool(device)


class RecordedStep:
    """A recorded step, called like the original function; it returns detached copies that the caller may keep.

    pool: the memory of the recordings; None if nothing is recorded.
    """

    def __init__(self, step: Callable[..., Any], model: nn.Module, optimizer: Optimizer, pool: GraphPool | None) -> None:
        self.step, self.model, self.optimizer = step, model, optimizer
        self.tensors = tensors_of(model)
        self.weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self.recorder = GraphRecorder(self.tensors[0].device, "steps run", logger.warning, pool)
        self._updated = False
        self._followed: Hashable = None
        self._gradients: list[Tensor] = []  # buffers that recordings add to, kept alive even if `.grad` is replaced
        optimizer.register_step_pre_hook(self._mark_updated)
        optimizer.register_load_state_dict_post_hook(self._drop_recordings)

    def __call__(self, *inputs: Tensor) -> Any:
        if not all(isinstance(each, Tensor) for each in inputs):
            raise InputError("a recorded step takes only tensors", fix="turn numbers that change between steps into tensors")
        self._follow()
        self._updated = False
        item = WorkItem((self.model.training, *(each.dtype for each in inputs)), self.step, inputs)
        is_warm = item.key in self.recorder.warm
        found = self.recorder.run([item], gradients=True, restart=self._restart, around_capture=self._around_capture)
        if not (is_warm or self._updated):
            raise InputError("the step makes no update", fix="call optimizer.step() and optimizer.zero_grad() inside it")
        return tree_map(lambda each: each.detach().clone() if isinstance(each, Tensor) else each, found)

    def _follow(self) -> None:
        """Drop all recordings if the weights or the optimizer's options that they read have been replaced."""
        options = [item for group in self.optimizer.param_groups for item in group.items() if item[0] != "params"]
        # Each replay reads the value of a tensor, so only its identity matters.
        values = [(name, value.data_ptr() if isinstance(value, Tensor) else value) for name, value in options]
        now = (tuple(map(Tensor.data_ptr, self.tensors)), repr(values))
        if now != self._followed:
            if self.recorder.recordings:
                logger.warning("steps are recorded again, because weights moved or an option of the optimizer changed")
            self._drop_recordings()
            self._followed = now

    def _drop_recordings(self, *_: Any) -> None:
        self.recorder.drop_all()
        self._gradients.clear()

    def _mark_updated(self, *_: Any) -> None:
        self._updated = True

    def _restart(self) -> bool:
        """Undo an incomplete step; return False if it is too late for that."""
        if not self._updated:
            for weight in self.weights:
                weight.grad = None
        return not self._updated

    @contextmanager
    def _around_capture(self) -> Iterator[None]:
        before = [weight.grad for weight in self.weights]
        try:
            yield
        finally:
            self._updated = False
            for weight, gradient in zip(self.weights, before, strict=True):
                if weight.grad is not gradient:
                    weight.grad = None  # a gradient left by a capture has memory in the pool, but no value
                elif gradient is not None:
                    self._gradients.append(gradient)
