"""State dicts of a whole model, with the same names and shapes for any number of processes that share its experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from kilolayer.errors import InputError
from kilolayer.moe.layer import expert_parameters
from kilolayer.moe.shard import expert_group
from kilolayer.parallel.collectives import gather_first
from kilolayer.parallel.peers import Peers


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the whole model, on the CPU. Call it on all processes; all but the first get an empty dict."""
    return {name: tensor.cpu() for name, tensor in join_state(model, model.state_dict()).items()}


def join_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Assemble tensors of the whole model from those of each process. Call it on all processes; all but the first get {}.

    state: tensors by the name of a parameter or buffer, or by NAME/mean and the like for the optimizer's state of one.
    Experts' tensors are gathered one at a time and moved to the CPU, so that a device never holds all experts.
    """
    group, of_experts = expert_group(model), {name for name, _ in expert_parameters(model)}
    if group is None:
        return dict(state)
    whole: dict[str, Tensor] = {}
    for name, tensor in state.items():
        joined = join_experts(tensor.to(group.device), group) if owner(name) in of_experts else tensor
        if joined is not None and group.rank == 0:
            whole[name] = joined if joined is tensor else joined.cpu()
    return whole


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load the weights and buffers of a whole model into `model`; if processes share the experts, each takes its own.

    state: tensors by name. They are requested one by one, so that a mapping that reads from a file need not hold them all.
    """
    group, of_experts = expert_group(model), {name for name, _ in expert_parameters(model)}
    ours = model.state_dict()
    if different := sorted(set(ours) ^ set(state)):
        raise InputError(
            f"the state does not fit the model: {different[0]!r} is in only one of them",
            fix="build the model with the configuration that the state was saved with",
        )
    for name, tensor in ours.items():
        given, size = state[name], tensor.shape
        if group is not None and name in of_experts:
            size = torch.Size([len(tensor) * group.size, *size[1:]])
        if given.shape != size:
            raise InputError(
                f"{name} has shape {list(given.shape)} in the state and {list(size)} in the model",
                fix="give the state of the whole model, of the same configuration: full_state_dict saves it",
            )
        tensor.copy_(own_experts(given, group) if group is not None and name in of_experts else given)


def owner(name: str) -> str:
    """The parameter's name: NAME for NAME/mean."""
    return name.partition("/")[0]


def join_experts(own: Tensor, group: Peers) -> Tensor | None:
    """Gather a tensor of experts on the first process: [experts held, ...] to [experts, ...]; None on the others."""
    parts = gather_first(own, group)
    return None if parts is None else parts.flatten(0, 1)


def own_experts(whole: Tensor, group: Peers) -> Tensor:
    """This process's part of a tensor of experts: [experts, ...] to [experts held, ...]."""
    part = group.part(len(whole))
    return whole[part.start : part.stop]
