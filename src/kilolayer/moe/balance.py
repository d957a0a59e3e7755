"""Load balancing of experts: the balance loss, the router z-loss, and the biases of loss-free balancing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kilolayer.errors import InputError
from kilolayer.moe.router import Choice, Router
from kilolayer.terminal import counted


class Statistics(NamedTuple):
    """Statistics over real tokens, as `statistics` defines them. first: [experts]; all others: [].

    If processes share the experts, tokens, first and entropy are over the tokens of all processes; balance and z are the
    contributions of this process, whose sum over the processes is the value for all tokens.
    """

    tokens: Tensor
    first: Tensor
    balance: Tensor
    z: Tensor
    entropy: Tensor


def token_sums(choice: Choice, real: Tensor | None) -> Tensor:
    """The sums over real tokens that `statistics` divides by their number: [experts + 1]. For each expert the number of tokens
    whose first choice it is, then the entropies of the gates."""
    counted = _counted(choice, real)
    numbers = torch.arange(choice.logits.shape[1], device=choice.experts.device)
    firsts = ((choice.experts[:, :1] == numbers) * counted).sum(dim=0)
    gates = choice.gates.detach()
    gates = gates / gates.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(gates.dtype).tiny)
    entropies = (-torch.xlogy(gates, gates).sum(dim=-1, keepdim=True) * counted).sum(dim=0)
    return torch.cat([firsts, entropies])


def statistics(choice: Choice, real: Tensor | None, sums: Tensor) -> Statistics:
    """Compute the terms of a router's losses, and its statistics; real: bool [tokens], False at padding.

        balance = E * sum_e m_e c_e    (GShard, X-MoE)
        z = mean(logsumexp(logits)^2)    (ST-MoE)

    E is the number of experts, m_e the mean of `choice.shares` for expert e, and c_e (`first`) the share of tokens whose first
    choice it is. entropy: of the gates, in nats. Means are over the tokens of `sums`: `token_sums`, added up over the processes
    whose tokens count as one batch.
    """
    experts = choice.logits.shape[1]
    firsts, entropies = sums.split([experts, 1])
    found = firsts.sum()
    count = found.clamp(min=1)
    first, portion = firsts / count, _counted(choice, real) / count
    balance = experts * ((choice.shares * portion).sum(dim=0) * first).sum()
    z = (choice.logits.logsumexp(dim=-1, keepdim=True).square() * portion).sum()
    return Statistics(found, first, balance, z, (entropies / count).squeeze())


def _counted(choice: Choice, real: Tensor | None) -> Tensor:
    """1 for each token, 0 at padding: [tokens, 1]."""
    return choice.logits.new_ones(len(choice.logits), 1) if real is None else real.to(choice.logits.dtype)[:, None]


def balanced_routers(model: nn.Module) -> list[Router]:
    """The routers that use loss-free balancing, in the order of the model's layers."""
    return [module for module in model.modules() if isinstance(module, Router) and module.selection_bias is not None]


@torch.no_grad()
def update_balance(model: nn.Module, loads: Sequence[Tensor]) -> None:
    """Move the biases of loss-free balancing one step: b += rate * sign(mean load - load) (Wang et al. 2024).

    Call it once after each step. loads: int [experts] for each sparse layer, in the model's order: `load` from the `routing`
    of the model's output, summed over the batches of the step.
    """
    routers = balanced_routers(model)
    if not isinstance(loads, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            f"the loads are given as {type(loads).__name__}", fix="give a list: [layer.load for layer in out.routing]"
        )
    if len(routers) != len(loads):
        raise InputError(
            f"{counted(len(loads), 'load')} for {counted(len(routers), 'layer')} with loss-free balancing",
            fix="give the load of each record in the forward's `routing`, of a model with moe.loss_free",
        )
    for router, load in zip(routers, loads, strict=True):
        assert router.selection_bias is not None
        if not isinstance(load, Tensor) or load.shape != router.selection_bias.shape:
            raise InputError(
                f"a load does not have {router.moe.experts} numbers, one for each expert",
                fix="give the load of each record in the forward's `routing`",
            )
        counts = load.to(router.selection_bias.dtype)
        router.selection_bias += router.moe.loss_free * (counts.mean() - counts).sign()
