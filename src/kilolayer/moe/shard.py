"""Expert parallelism: several processes share the experts; each holds some of them and has its own tokens.

The loss of a process must be its share of the total loss: the sum over its tokens divided by the number of tokens of all
processes, plus the router_loss of its forward pass. Losses add up over processes, and so do the gradients of the parameters
that every process holds (`reduce_gradients`). The gradients of experts are complete on the process that holds them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from kilolayer.errors import InputError
from kilolayer.layers.modules import modules_of
from kilolayer.moe.experts import ExpertProjection
from kilolayer.moe.layer import SparseFeedForward, expert_parameters, need_sparse_layers
from kilolayer.parallel.collectives import gather, sum_gradients
from kilolayer.parallel.peers import Peers


@torch.no_grad()
def shard_experts(model: nn.Module, processes: dist.ProcessGroup | None = None, *, one_batch: bool = True) -> None:
    """Divide the experts of `model` among processes: this one keeps its part and discards the others.

    processes: the group that shares the experts; None: all processes. Call it on each of them, with the same model, before the
    optimizer is created. A model on the meta device never allocates the experts of other processes, and its own experts get
    the same initial weights as in the whole model.
    one_batch: the batches of all processes count as one batch in router losses, capacity and `routing`. If False, each process
    counts only its own, like gradient accumulation on one process; losses and loads must then be summed by the caller.
    """
    group, layers = Peers.of(processes), need_sparse_layers(model)
    if expert_group(model) is not None:
        raise InputError("the experts of this model are already shared", fix="shard them once")
    weights = [weight for layer in layers.values() for _, weight in expert_parameters(layer)]
    if len(set(weights)) < len(weights):
        raise InputError("layers of this model use the same experts", fix="give each layer experts of its own")
    parts = {layer.moe.experts: group.part(layer.moe.experts) for layer in layers.values()}
    _check_equal(model, group)
    for layer in layers.values():
        part = parts[layer.moe.experts]
        for module in layer.experts.modules():
            if isinstance(module, ExpertProjection):
                module.first = part.start
        for _, parameter in expert_parameters(layer):
            parameter.data = parameter.data[part.start : part.stop].clone()
            parameter.grad = None
        layer.group, layer.joint = group, group if one_batch else None


def expert_group(model: nn.Module) -> Peers | None:
    """The processes that share the experts of `model`; None if the experts are not shared or there are none."""
    return next((module.group for module in modules_of(model) if isinstance(module, SparseFeedForward)), None)


def refuse_part(model: nn.Module) -> None:
    """Raise if this process holds only a part of the experts; for functions that need the whole model."""
    if expert_group(model) is not None:
        raise InputError(
            "this process has only its own part of the experts",
            fix="load full_state_dict(model) into a whole model, and use that",
        )


def reduce_gradients(model: nn.Module) -> None:
    """Sum the gradients of all other parameters over the processes that share the experts.

    Call it after the last backward pass of a step.
    """
    group = expert_group(model)
    if group is None:
        raise InputError("no other process shares the experts of this model", fix="call kilolayer.shard_experts first")
    own = {parameter for _, parameter in expert_parameters(model)}
    sum_gradients((parameter for parameter in model.parameters() if parameter not in own), group)


def _check_equal(model: nn.Module, group: Peers) -> None:
    """Raise if the weights, or on the meta device the seeds, differ between processes."""
    weights = list(model.parameters())
    if any(weight.is_meta for weight in weights):
        seed = torch.tensor(getattr(model, "seed", 0), device=group.device)
        equal = bool((gather(seed, group) == seed).all())
    else:
        sums = torch.stack([weight.double().sum() for weight in weights])
        # Sums on different hardware may be rounded differently; different weights are much further apart.
        equal = torch.allclose(gather(sums, group), sums, rtol=1e-6, atol=1e-6, equal_nan=True)
    if not equal:
        raise InputError(
            "the processes have different models",
            where=f"rank {group.rank} of {group.size}",
            fix="give torch.manual_seed the same number on each before the model is built, or load the same weights",
        )
