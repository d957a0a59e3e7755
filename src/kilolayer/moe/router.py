"""Routers: which experts each token is sent to, and with which weights.

All arithmetic is in fp32 or higher precision, whatever the dtype of the rest of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import log
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kilolayer.layers.initialize import KeyedGenerator
from kilolayer.moe.config import SMALLEST_TEMPERATURE, MoE
from kilolayer.recipes.base import Plan
from kilolayer.recipes.role import Role

SMALLEST_NORM = 1e-6  # a lower bound for the norm that a vector is divided by


class Choice(NamedTuple):
    """The experts that each token is sent to.

    experts: int64 [tokens, k], best first; the number of experts marks a choice that is not sent anywhere.
    weights: [tokens, k], the factor of each chosen expert's output.
    logits: [tokens, experts], the scores divided by the learned temperature.
    gates: [tokens, experts], softmax or sigmoid of the logits, from which the weights are derived.
    shares: [tokens, experts], the distribution that the balance loss makes even.
    """

    experts: Tensor
    weights: Tensor
    logits: Tensor
    gates: Tensor
    shares: Tensor


class Router(nn.Module):
    """Chooses the k experts with the highest scores for each token.

    selection_bias: [experts], for loss-free balancing; it affects which experts are chosen, but not their weights.
    Parameters stay in fp32 when the model is converted to lower precision.
    """

    weight: nn.Parameter
    selection_bias: Tensor | None

    def __init__(self, moe: MoE, plan: Plan) -> None:
        super().__init__()
        self.moe, self.plan = moe, plan
        bias = torch.empty(moe.experts, dtype=_precise()) if moe.loss_free else None
        self.register_buffer("selection_bias", bias)

    def reset_parameters(self, generator: KeyedGenerator | None = None) -> None:
        if self.selection_bias is not None:
            self.selection_bias.zero_()

    def score(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, dim] to two tensors of logits [tokens, experts]: for the gate, and for the balance loss."""
        raise NotImplementedError

    @property
    def temperature(self) -> Tensor:
        """The number that scores are divided by: []."""
        raise NotImplementedError

    def forward(self, tokens: Tensor, real: Tensor | None) -> Choice:
        """Choose experts for tokens [tokens, dim]; real: bool [tokens], False at padding, which is not sent anywhere."""
        with _without_autocast(tokens.device):
            logits, even_logits = self.score(tokens.to(self.weight.dtype))
            gates = logits.sigmoid() if self.moe.gate == "sigmoid" else logits.softmax(dim=-1)
            experts = self._select(logits, gates)
            weights = self._weights(logits, gates, experts)
            sent = self._sent(weights, real)
            if sent is not None:
                experts, weights = torch.where(sent, experts, self.moe.experts), torch.where(sent, weights, 0)
            return Choice(experts, weights, logits, gates, even_logits.softmax(dim=-1))

    def _select(self, logits: Tensor, gates: Tensor) -> Tensor:
        """The chosen experts: int64 [tokens, k], best first."""
        # Gates are monotonic in the logits, but can underflow to 0 in fp32.
        preferred = (logits if self.selection_bias is None else gates + self.selection_bias).detach()
        if not self.training or self.moe.second != "sampling":
            return preferred.topk(self.moe.top_k, dim=-1).indices
        first = preferred.argmax(dim=-1, keepdim=True)
        gumbel = -(-torch.rand_like(preferred).log()).log()
        second = (preferred + gumbel).scatter(1, first, float("-inf")).argmax(dim=-1, keepdim=True)
        return torch.cat([first, second], dim=1)

    def _weights(self, logits: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
        """[tokens, k]: the gate itself if k = 1; otherwise each gate divided by the sum of the chosen gates."""
        if self.moe.top_k == 1:
            return gates.gather(1, experts)
        # Computed from logarithms (up to a constant), because the gates themselves can underflow to 0 in fp32.
        logarithms = F.logsigmoid(logits) if self.moe.gate == "sigmoid" else logits
        return logarithms.gather(1, experts).softmax(dim=1)

    def _sent(self, weights: Tensor, real: Tensor | None) -> Tensor | None:
        """Which choices are sent to their experts: bool [tokens, k]; None if all are."""
        sent = None if real is None else real[:, None].expand_as(weights)
        if self.training and self.moe.second == "random":
            # GShard (Lepikhin et al. 2020), algorithm 1: the second choice is kept with probability 2 g_2.
            drawn = 2 * weights[:, 1:] > torch.rand_like(weights[:, 1:])
            kept = torch.cat([torch.ones_like(drawn), drawn], dim=1)
            sent = kept if sent is None else sent & kept
        return sent

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def precise(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == _precise(moved.dtype) else tensor.to(moved.device)

        return super()._apply(precise, recurse)


class CosineRouter(Router):
    """X-MoE (Chi et al. 2022): scores s_i = cos(W h, e_i), and logits s / t with a learned temperature t.

    The balance loss uses s / t_0, with the initial temperature t_0. W (weight): [compared_dim, dim]; e_i (embeddings):
    [experts, compared_dim].
    """

    def __init__(self, moe: MoE, dim: int, plan: Plan) -> None:
        super().__init__(moe, plan)
        self.weight = nn.Parameter(torch.empty(moe.compared_dim, dim, dtype=_precise()))
        self.embeddings = nn.Parameter(torch.empty(moe.experts, moe.compared_dim, dtype=_precise()))
        self.log_temperature = nn.Parameter(torch.empty((), dtype=_precise()))

    def reset_parameters(self, generator: KeyedGenerator | None = None) -> None:
        generator = generator or KeyedGenerator()
        super().reset_parameters(generator)
        generator.draw_(self.weight, self.plan, Role.ROUTER, "weight")
        generator.draw_(self.embeddings, self.plan, Role.ROUTER, "embeddings")
        self.log_temperature.fill_(log(self.moe.starting_temperature))

    @property
    def temperature(self) -> Tensor:
        return self.log_temperature.clamp(min=log(SMALLEST_TEMPERATURE)).exp()

    def score(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        cosines = F.linear(_directions(F.linear(tokens, self.weight)), _directions(self.embeddings))
        return cosines / self.temperature, cosines / self.moe.starting_temperature


class LinearRouter(Router):
    """A linear router: logits W h, with W (weight) [experts, dim]."""

    def __init__(self, moe: MoE, dim: int, plan: Plan) -> None:
        super().__init__(moe, plan)
        self.weight = nn.Parameter(torch.empty(moe.experts, dim, dtype=_precise()))

    def reset_parameters(self, generator: KeyedGenerator | None = None) -> None:
        generator = generator or KeyedGenerator()
        super().reset_parameters(generator)
        generator.draw_(self.weight, self.plan, Role.ROUTER, "weight")

    @property
    def temperature(self) -> Tensor:
        return self.weight.new_ones(())

    def score(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(tokens, self.weight)
        return logits, logits


def _directions(vectors: Tensor) -> Tensor:
    """Vectors [..., size] divided by their norms; clamped before the root, so that a zero vector has finite gradients."""
    return vectors / vectors.square().sum(dim=-1, keepdim=True).clamp_min(SMALLEST_NORM**2).sqrt()


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def _precise(dtype: torch.dtype | None = None) -> torch.dtype:
    return torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)


def make_router(moe: MoE, dim: int, plan: Plan) -> Router:
    """Build the router that the options specify."""
    return {"xmoe": CosineRouter, "linear": LinearRouter}[moe.router](moe, dim, plan)
