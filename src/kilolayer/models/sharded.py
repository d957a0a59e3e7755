"""Models whose weights FSDP2 has sharded: their own class, and their weights, gathered to be written once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kilolayer.errors import KilolayerError

HOME = "torch.distributed.fsdp"
"""Where torch defines the classes that `fully_shard` puts before a module's own; not imported, because that is slow."""


def is_shard(tensor: Tensor) -> bool:
    """Whether this process holds only its part of the tensor (DTensor)."""
    return hasattr(tensor, "full_tensor")


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before `fully_shard` changed it."""
    return next(cls for cls in type(module).__mro__ if not cls.__module__.startswith(HOME))


def is_unit(module: nn.Module) -> bool:
    """Whether `fully_shard` has changed the module, so that a call of it gathers its weights."""
    return plain_class(module) is not type(module)


def units_of(model: nn.Module) -> Iterator[Any]:
    """The modules that `fully_shard` has changed, the model first if it is one; nothing if it is not sharded."""
    return filter(is_unit, model.modules())


def call_as(module: nn.Module, function: Callable[..., Any], *inputs: Any) -> Any:
    """`function` in a call of the module, around which FSDP2's hooks gather its matrices and divide their gradients."""
    vars(module)["forward"] = function
    try:
        return module(*inputs)
    finally:
        del vars(module)["forward"]


def write_once(
    model: nn.Module, tensors: Callable[[nn.Module], dict[str, Tensor]], write: Callable[[dict[str, Tensor]], None]
) -> None:
    """Call `write` with the tensors of a model; those of a sharded one are gathered, and the first process writes.

    All processes that hold shards call it; if the first one cannot write, it raises on all.
    """
    units = list(units_of(model))
    if not units:
        write(tensors(model))
        return
    for unit in units:
        unit.reshard()  # weights that a forward pass has gathered, and no backward pass has released
    shards: dict[str, Any] = dict(tensors(model))
    mesh = next(tensor.device_mesh for tensor in shards.values() if is_shard(tensor))
    first = not any(mesh.get_coordinate())
    whole = _gather(shards, keep=first)
    failures: list[KilolayerError | None] = [None]
    if first:
        try:
            write(whole)
        except KilolayerError as error:
            failures = [error]
    for axis in range(mesh.ndim):
        dist.broadcast_object_list(failures, group=mesh.get_group(axis), group_src=0)
    if failures[0] is not None:
        raise failures[0]


@torch.no_grad()
def _gather(tensors: dict[str, Any], keep: bool) -> dict[str, Tensor]:
    """All tensors whole, on the CPU; nothing on a process that does not keep them."""
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if is_shard(tensor) else tensor
        if keep:
            whole[name] = full.cpu()
    return whole
