"""Matrices in shards: each of several processes holds some rows of every matrix, and FSDP2 gathers a layer's to compute it.

    gathered = all_gather(rows),    rows.grad = reduce_scatter(gathered.grad)

Norms, biases, scales and routers, which are small, stay whole on each process, and so do the experts that it holds.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kilolayer.errors import OptionError
from kilolayer.layers.initialize import KeyedGenerator, reset
from kilolayer.layers.stack import Stack
from kilolayer.models.model import ALWAYS_PRECISE, IN_PRODUCTS, Model
from kilolayer.models.sharded import is_shard, plain_class, units_of
from kilolayer.moe.experts import ExpertNorm, ExpertProjection
from kilolayer.moe.layer import expert_parameters, sparse_layers
from kilolayer.moe.shard import expert_group
from kilolayer.parallel.collectives import gather
from kilolayer.parallel.heartbeat import begin_collective
from kilolayer.parallel.peers import Peers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# torch 2.13 has new names, and warns of the old ones.
ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def shard_mesh(group: Peers, kind: str, *, hybrid: bool) -> DeviceMesh:
    """All processes of the group, which share every matrix; hybrid: those of one machine do, and machines have copies.

    One machine that is left of several is the same in both. kind: of their devices, "cpu" or "cuda".
    """
    from torch.distributed.device_mesh import DeviceMesh

    here = int(os.environ.get("LOCAL_WORLD_SIZE", group.size))
    counts = gather(torch.tensor(here, device=group.device), group).tolist() if hybrid else [group.size]
    if set(counts) == {group.size}:
        return DeviceMesh.from_group(group.processes, kind, mesh_dim_names=("shard",))
    if 1 in counts or len(set(counts)) > 1 or group.size % here:
        raise OptionError(
            "hybrid shards need machines with equally many processes, two or more; "
            f"here are {' or '.join(map(str, sorted(set(counts))))} of {group.size} on a machine",
            where="train.shard",
            fix='set it to "full"',
        )
    return _mesh_of_rows(group, kind, here, ("copy", "shard"))


def expert_mesh(group: Peers, kind: str, experts: int) -> DeviceMesh:
    """Rows of processes that divide the experts, as many as evenly can; those of a column share the same ones in shards."""
    return _mesh_of_rows(group, kind, math.gcd(experts, group.size), ("shard", "expert"))


def _mesh_of_rows(group: Peers, kind: str, length: int, names: tuple[str, str]) -> DeviceMesh:
    """A mesh of two axes whose rows are `length` consecutive processes."""
    from torch.distributed.device_mesh import DeviceMesh

    ranks = torch.arange(group.size).view(-1, length)
    backend = dist.get_backend(group.processes)
    columns, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), backend=backend)
    rows, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), backend=backend)
    groups: Any = [columns, rows]
    return DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=names)


def shard_matrices(
    model: Model,
    mesh: DeviceMesh,
    *,
    unit: int,
    dtype: torch.dtype | None,
    reshards: bool = True,
    experts: DeviceMesh | None = None,
) -> None:
    """Divide the matrices and tables of a model on the meta device among the processes of a mesh, in place.

    unit: layers that are gathered together. dtype: of the gathered matrices; their shards keep their own dtype, and so do the
    gradients, which are summed over the processes and not averaged. reshards: whether a unit is released after its forward
    pass, and gathered again for its backward pass. experts: the mesh of `expert_mesh`, if the processes of its columns have
    the same experts; these are gathered by themselves.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    sharded = {*matrices_of(model), *(weight for _, weight in expert_parameters(model) if experts is not None)}
    precise = MixedPrecisionPolicy(cast_forward_inputs=False)
    policy = replace(precise, param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    whole = {weight for weight in model.parameters() if weight not in sharded}
    if experts is not None:
        for layer in sparse_layers(model).values():
            for norm in [module for module in layer.experts.modules() if isinstance(module, ExpertNorm)]:
                fully_shard(norm, mesh=experts["shard"], mp_policy=precise, reshard_after_forward=reshards)
            fully_shard(
                layer.experts, mesh=experts["shard"], mp_policy=policy, ignored_params=whole, reshard_after_forward=reshards
            )
            layer.experts.gathered_dtype = dtype
    units = [list(stack.blocks[first : first + unit]) for stack in stacks for first in range(0, len(stack.blocks), unit)]
    for modules in units:
        together: Any = modules if len(modules) > 1 else modules[0]
        fully_shard(together, mesh=mesh, mp_policy=policy, ignored_params=whole, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=whole)
    for each in units_of(model):
        each.set_gradient_divide_factor(1.0)
        each.set_force_sum_reduction_for_comms(True)  # gloo can only sum
        each.set_custom_all_gather(_Gather())
        each.set_custom_reduce_scatter(_Scatter())
    for stack in stacks:
        stack.gathered_dtype = dtype
    model.sharers = Peers.of(mesh.get_group("shard"))
    _allow_views({type(each).__name__ for each in units_of(model)})


def _allow_views(classes: set[str]) -> None:
    """Ignore FSDP2's warning of outputs that are views for these classes alone: ours change no output in place."""
    # Not around each call, where it would cost more and is not safe beside other threads.
    name = f"({'|'.join(sorted(classes))})"
    message = rf"FSDP2-wrapped module \({name}(, {name})*\) returned a view"
    warnings.filterwarnings("ignore", message=message, category=UserWarning)


def matrices_of(model: nn.Module) -> Iterator[nn.Parameter]:
    """The weights that are divided among processes: those of matrix products and tables, without their biases."""
    return (weight for weight in weights_in_products(model) if weight.ndim > 1)


def weights_in_products(model: nn.Module) -> Iterator[nn.Parameter]:
    """Matrices, tables and biases, without those of experts."""
    for module in model.modules():
        if isinstance(module, IN_PRODUCTS) and not isinstance(module, (ExpertProjection, *ALWAYS_PRECISE)):
            yield from module.parameters(recurse=False)


@torch.no_grad()
def materialize_shards(model: Model, device: torch.device) -> None:
    """Allocate and initialize a sharded model on the meta device: the weights are those of the whole model of the same seed.

    Each process fills one whole module at a time and keeps its rows.
    """
    model.to_empty(device=device)
    for name, module in model.named_modules():
        shards = {key: weight for key, weight in module._parameters.items() if weight is not None and is_shard(weight)}
        if not shards:
            reset(module, KeyedGenerator(model.seed, name))
            continue
        whole = object.__new__(plain_class(module))
        empty = {
            key: None if each is None else nn.Parameter(torch.empty(each.shape, dtype=each.dtype, device=device), False)
            for key, each in module._parameters.items()
        }
        vars(whole).update(vars(module) | {"_parameters": empty})
        reset(whole, KeyedGenerator(model.seed, name))
        for key, shard in shards.items():
            local(shard).copy_(rows_of(empty[key], shard))
        for key in module._parameters.keys() - shards.keys():
            own, filled = module._parameters[key], empty[key]
            if own is not None and filled is not None:
                own.copy_(filled)
    # Made outside of torch.inference_mode, in which a run may begin with a validation.
    for unit in units_of(model):
        unit.unshard()
        unit.reshard()


def local(tensor: Any) -> Tensor:
    """What this process holds of a tensor: its rows of a sharded one, or all of it. It shares their memory."""
    return tensor.to_local() if is_shard(tensor) else tensor


def shard_group(shard: Any) -> Peers:
    """The processes that share a sharded tensor."""
    return Peers.of(shard.device_mesh.get_group("shard"))


def group_in_step(model: nn.Module) -> Peers | None:
    """The processes that run each forward pass together, as they share the model's experts or matrices; None: only this."""
    if isinstance(model, Model) and model.sharers is not None:
        return model.sharers  # also while all matrices are gathered
    shard = next((weight for weight in model.parameters() if is_shard(weight)), None)
    return expert_group(model) if shard is None else shard_group(shard)


def row_range(shard: Any) -> range:
    """The rows of a sharded tensor that this process holds."""
    group = shard_group(shard)
    at_once = -(-len(shard) // group.size)
    first = min(group.rank * at_once, len(shard))
    return range(first, first + len(local(shard)))


def rows_of(whole: Any, shard: Any) -> Tensor:
    """This process's rows of a whole tensor, which is divided like `shard`."""
    rows = row_range(shard)
    return whole[rows.start : rows.stop]


@contextmanager
def gathered_outside_layers(model: nn.Module) -> Iterator[None]:
    """A context in which what is outside of the layers, such as tables, is gathered: parts of the model can be called.

    After it nothing is gathered, so that a recording of the next step gathers all that it computes with.
    """
    units = list(units_of(model))
    for root in units[:1]:
        root.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()


class _Counted:
    """A collective operation of FSDP2, counted for the watchdog."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Counted):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        begin_collective()
        return ALL_GATHER(output_tensor, input_tensor, group=group, async_op=async_op)


class _Scatter(_Counted):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        begin_collective()
        return REDUCE_SCATTER(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
