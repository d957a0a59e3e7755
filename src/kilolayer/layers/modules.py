"""Fast iteration over the modules of a deep model, and copies of them.

Every search iterates over all modules, and `nn.Module.modules()` would take as long as several decoding steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The model and all modules inside it; a module registered under two names is listed twice."""
    found = [model]
    for module in found:
        if module._modules:
            found += [inner for inner in module._modules.values() if inner is not None]
    return found


def tensors_of(model: nn.Module) -> list[Tensor]:
    """All parameters and buffers."""
    dictionaries = [each for module in modules_of(model) for each in (module._parameters, module._buffers) if each]
    return [tensor for each in dictionaries for tensor in each.values() if tensor is not None]


def shallow_copy(module: AnyModule, **attributes: Any) -> AnyModule:
    """A second module of the same class that shares all attributes but these.

    `copy.copy` would call the constructor of a class that FSDP2 has changed.
    """
    copied = object.__new__(type(module))
    vars(copied).update(vars(module) | attributes)
    return copied


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """A context in which all modules are in training mode, or in evaluation mode; each is restored afterwards."""
    others = [module for module in modules_of(model) if module.training is not training]
    for module in others:
        module.training = training
    try:
        yield
    finally:
        for module in others:
            module.training = not training
