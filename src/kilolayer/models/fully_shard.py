"""FSDP2 for a model of layers: units of some layers each, and what it cannot shard kept whole on each process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from kilolayer.errors import InputError, OptionError, shown
from kilolayer.layers.stack import Stack
from kilolayer.models.adapt.layouts import KNOWN
from kilolayer.models.adapt.stacks import stacks_of
from kilolayer.moe.shard import refuse_part

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def fully_shard(model: AnyModule, *, unit: int = 1, mesh: Any = None, **options: Any) -> AnyModule:
    """Shard the weights of a model over processes with torch's FSDP2, in place, and return it; call it on each process.

    `torch.distributed.fsdp.fully_shard` makes one unit of every `unit` layers of a stack, and one of what is outside of the
    stacks. A parameter of one number, such as ReZero's, cannot be sharded: each process keeps it whole, and its gradient is
    averaged over the processes in the backward pass, as FSDP2 averages the others. Create the optimizer afterwards.

    model: one of ours, one that `kl.adapt` has changed, or a module that contains one; the same weights on each process.
    unit: layers that are gathered together; several cost more memory, and less time on the host in a deep model.
    mesh: a `DeviceMesh` of one axis, or of two for hybrid shards; None: all processes.
    options: those of torch's function, such as `reshard_after_forward`.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    stacks = _checked_stacks(model, unit, mesh, options)
    groups: list[Any] = [dist.group.WORLD] if mesh is None else [mesh.get_group(axis) for axis in range(mesh.ndim)]
    scalars = {weight for weight in model.parameters() if weight.dim() == 0}
    for weight in scalars:
        if weight.requires_grad:
            weight.register_hook(partial(_average, groups=groups))
    units = [list(layers[first : first + unit]) for layers in stacks for first in range(0, len(layers), unit)]
    for modules in (*units, [model]):
        together: Any = modules if len(modules) > 1 else modules[0]
        fully_shard(together, mesh=mesh, ignored_params=scalars, **options)
    if any(dist.get_backend(group) == "gloo" for group in groups):  # which can only sum; FSDP2 then divides by itself
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return model


def _average(gradient: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """The mean of a gradient over all processes of the mesh that these groups, one for each axis, span."""
    total = gradient.clone()
    for group in groups:
        dist.all_reduce(total, group=group)
        total /= group.size()
    return total


def _checked_stacks(model: nn.Module, unit: int, mesh: Any, options: dict[str, Any]) -> list[Sequence[nn.Module]]:
    """The layers of each stack of the model; raises if it cannot be sharded."""
    if not isinstance(model, nn.Module):
        raise InputError(f"this is not a model: {shown(model)}", where="kl.fully_shard", fix="give a model, then the options")
    if not dist.is_initialized():
        raise InputError(
            "there is no process group to shard the model over",
            where="kl.fully_shard",
            fix="start the script with torchrun, and call torch.distributed.init_process_group() first",
        )
    if mesh is not None and not hasattr(mesh, "mesh_dim_names"):
        raise InputError(
            f"a {type(mesh).__name__} is not a mesh of devices",
            where="mesh",
            fix='give a DeviceMesh, such as torch.distributed.device_mesh.init_device_mesh("cuda", (8,)), or leave it out',
        )
    if "ignored_params" in options:
        raise OptionError(
            "ignored_params is chosen by kl.fully_shard",
            fix="leave it out, or call torch.distributed.fsdp.fully_shard yourself on each layer and on the model",
        )
    weights = list(model.parameters())
    if any(hasattr(weight, "full_tensor") for weight in weights):
        raise InputError("the weights of this model are already sharded", where="kl.fully_shard", fix="shard a model once")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise InputError("DistributedDataParallel has a copy on each process", fix="shard the model inside it, without DDP")
    refuse_part(model)
    if any(weight.is_meta for weight in weights):
        raise InputError("this model is on the meta device", fix="call model.materialize(device) first")
    if len({weight.dtype for weight in weights if weight.requires_grad}) > 1:
        raise InputError(
            "FSDP2 needs trained weights of one dtype, and this model has several",
            where="kl.fully_shard",
            fix="leave all weights in fp32, and compute in bf16 with torch.autocast",
        )
    own = [list(module.blocks) for module in model.modules() if isinstance(module, Stack)]
    stacks: list[Sequence[nn.Module]] = [*own, *(stack.layers for stack in stacks_of(model))]
    if not stacks:
        raise InputError(
            f"{type(model).__name__} has no stack of layers of a known class",
            where="kl.fully_shard",
            fix=f"give a model of Kilolayer or of one of these: {', '.join(KNOWN)}",
        )
    deepest = max(map(len, stacks))
    if not isinstance(unit, int) or isinstance(unit, bool) or not 1 <= unit <= deepest:
        raise OptionError(f"unit is {shown(unit)}", fix=f"allowed: 1 to {deepest}, the layers of the deepest stack")
    return stacks
