"""All modules of a deep model. A search asks for them each time, and torch's own walk takes as long as several of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The model and all modules inside it; one with two names is there twice."""
    found = [model]
    for module in found:
        if module._modules:
            found += [inner for inner in module._modules.values() if inner is not None]
    return found


def tensors_of(model: nn.Module) -> list[Tensor]:
    """All parameters and buffers."""
    dictionaries = [each for module in modules_of(model) for each in (module._parameters, module._buffers) if each]
    return [tensor for each in dictionaries for tensor in each.values() if tensor is not None]


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """All modules in training, or none, inside; afterwards each is as it was."""
    others = [module for module in modules_of(model) if module.training is not training]
    for module in others:
        module.training = training
    try:
        yield
    finally:
        for module in others:
            module.training = not training
