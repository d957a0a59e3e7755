"""Hooks on the plain modules of a model while it computes a loss, restricted to real positions (no padding)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kilolayer.layers.context import Sequences
from kilolayer.layers.modules import in_mode
from kilolayer.layers.stack import Stack
from kilolayer.models.model import Model
from kilolayer.probe.propagation import Loss

ByLayer = dict[str, tuple[float, ...]]
"""One number per layer, from the input on, by stack."""
ByKind = dict[str, dict[str, tuple[float, ...]]]
"""The same by stack and by kind of sublayer, or by module name within a layer; NaN if a layer has none."""


class ForwardHooks:
    """Registers temporary hooks, and knows which positions of each stack's input are real."""

    def __init__(self, model: Model) -> None:
        self.stacks = model.stacks()
        self.real: dict[str, Tensor | None] = {}
        self.split: dict[str, int | None] = {}
        self.handles: list[RemovableHandle] = []
        for stack in self.stacks:
            self.before(stack, self._record_padding)

    def before(self, module: nn.Module, hook: Callable[..., None]) -> None:
        """Call `hook(module, inputs)` before the module's forward."""
        self.handles.append(module.register_forward_pre_hook(hook))

    def after(self, module: nn.Module, hook: Callable[..., None]) -> None:
        """Call `hook(module, inputs, output)` after the module's forward."""
        self.handles.append(module.register_forward_hook(hook))

    def real_positions(self, side: str, x_BLD: Tensor, way: str = "") -> Tensor:
        """Select the real positions of a stack's states: [batch, length, width] to [positions, width].

        way: A or B if x has only the positions of one modality (layers/multiway.py).
        """
        real, split = self.real.get(side), self.split.get(side)
        if real is not None and way:
            real = real[:, :split] if way == "A" else real[:, split:]
        return x_BLD.detach().flatten(0, 1) if real is None else x_BLD.detach()[real]

    def _record_padding(self, stack: Stack, inputs: tuple[Sequences, ...]) -> None:
        self.real[stack.side], self.split[stack.side] = inputs[0].real, inputs[0].split

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


@contextmanager
def forward_hooks(model: Model) -> Iterator[ForwardHooks]:
    """Yield `ForwardHooks` on the model, which is in evaluation mode inside: no dropout, no capacity limits of experts."""
    hooks = ForwardHooks(model)
    try:
        with in_mode(model, training=False):
            yield hooks
    finally:
        hooks.remove()


def compute(model: Model, loss: Loss) -> float:
    """Compute the loss for the sake of the hooks, without gradients."""
    with torch.no_grad():
        return float(loss(model))


def top_states(loss: Loss) -> Callable[[Model], Tensor]:
    """A function F(x) of a model: the output of its last stack for the batch of `loss`, at real positions: [positions, dim]."""

    def output(model: Model) -> Tensor:
        found: list[Tensor] = []
        with forward_hooks(model) as hooks:
            last = hooks.stacks[-1]
            hooks.after(last, lambda _stack, _inputs, out: found.append(hooks.real_positions(last.side, out.states)))
            compute(model, loss)
        return found[-1]

    return output


def root_mean_square(x: Tensor) -> float:
    """The root mean square of all elements; NaN if there are none."""
    return float(x.double().square().mean().sqrt())


def layer_and_module(name: str) -> tuple[int | None, str]:
    """Split a module's name: `blocks.3.self_attention.pre_norm` is layer 3 and the module `self_attention.pre_norm`."""
    parts = name.split(".")
    index = next((module for module, part in enumerate(parts) if part.isdigit()), None)
    if index is None:
        return None, name
    module = [part for part in parts[:index] if part != "blocks"] + [part for part in parts[index + 1 :] if part != "f"]
    return int(parts[index]), ".".join(module)


def table_by_module(found: dict[tuple[int | None, str], float], layers: int) -> dict[str, tuple[float, ...]]:
    """Values by layer and module as one row per module; a module outside the layers has a single value."""
    rows: dict[str, Any] = {}
    for (layer, module), value in found.items():
        if layer is None:
            rows[module] = (value,)
        else:
            rows.setdefault(module, [float("nan")] * layers)[layer] = value
    return {module: tuple(values) for module, values in rows.items()}
