"""Which experts serve a token, and with what weights. All arithmetic is in fp32 or more, whatever the rest of a model is in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import log
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kilolayer.layers.initialise import Noise
from kilolayer.moe.config import SMALLEST_TEMPERATURE, MoE
from kilolayer.recipes.base import Plan, Role

SMALLEST_NORM = 1e-6  # below it a vector has no direction


class Choice(NamedTuple):
    """experts: int64 [tokens, k], the best first; the number of experts where a token is sent nowhere. weights: [tokens, k].

    logits: [tokens, experts], the scores at the learned temperature. gates: [tokens, experts], what weights are taken from.
    shares: [tokens, experts], the distribution that the balance loss evens out.
    """

    experts: Tensor
    weights: Tensor
    logits: Tensor
    gates: Tensor
    shares: Tensor


class Router(nn.Module):
    """The experts of each token by its scores. `selection_bias` [experts], for loss-free balancing, changes the choice alone.

    Parameters stay in fp32 when a model is converted to less.
    """

    weight: nn.Parameter
    selection_bias: Tensor | None

    def __init__(self, moe: MoE, plan: Plan) -> None:
        super().__init__()
        self.moe, self.plan = moe, plan
        bias = torch.empty(moe.experts, dtype=_precise()) if moe.loss_free else None
        self.register_buffer("selection_bias", bias)

    def fill(self, noise: Noise) -> None:
        if self.selection_bias is not None:
            self.selection_bias.zero_()

    def score(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, dim] to logits [tokens, experts], as the gate reads them and as the balance loss does."""
        raise NotImplementedError

    @property
    def temperature(self) -> Tensor:
        """What the scores are divided by: a scalar."""
        raise NotImplementedError

    def forward(self, tokens: Tensor, real: Tensor | None) -> Choice:
        """The choice of [tokens, dim]; real: bool [tokens], False at padding, which is sent nowhere."""
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
        """Int64 [tokens, k], the best first."""
        # Gates grow with logits, but far apart they are all 0 in fp32.
        preferred = (logits if self.selection_bias is None else gates + self.selection_bias).detach()
        if not self.training or self.moe.second != "sampling":
            return preferred.topk(self.moe.top_k, dim=-1).indices
        first = preferred.argmax(dim=-1, keepdim=True)
        gumbel = -(-torch.rand_like(preferred).log()).log()
        second = (preferred + gumbel).scatter(1, first, float("-inf")).argmax(dim=-1, keepdim=True)
        return torch.cat([first, second], dim=1)

    def _weights(self, logits: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
        """g_1 of one expert; of several, each gate over the sum of those chosen: [tokens, k]."""
        if self.moe.top_k == 1:
            return gates.gather(1, experts)
        # By their logarithms, but for a constant: the gates themselves may all be 0 in fp32.
        logarithms = F.logsigmoid(logits) if self.moe.gate == "sigmoid" else logits
        return logarithms.gather(1, experts).softmax(dim=1)

    def _sent(self, weights: Tensor, real: Tensor | None) -> Tensor | None:
        """Which choices count: bool [tokens, k]; None where all do."""
        sent = None if real is None else real[:, None].expand_as(weights)
        if self.training and self.moe.second == "random":
            # GShard (Lepikhin et al. 2020), algorithm 1: with probability 2 g_2.
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
    """X-MoE (Chi et al. 2022): s_i = cos(W h, e_i), the logits s / t, t learned.

    The balance loss reads s / t_0, t_0 the starting temperature. weight: [compared, dim]; embeddings: [experts, compared].
    """

    def __init__(self, moe: MoE, dim: int, plan: Plan) -> None:
        super().__init__(moe, plan)
        self.weight = nn.Parameter(torch.empty(moe.compared_dim, dim, dtype=_precise()))
        self.embeddings = nn.Parameter(torch.empty(moe.experts, moe.compared_dim, dtype=_precise()))
        self.log_temperature = nn.Parameter(torch.empty((), dtype=_precise()))

    def fill(self, noise: Noise) -> None:
        super().fill(noise)
        noise.xavier_(self.weight, self.plan.gain(Role.ROUTER), self.plan.xavier, "weight")
        noise.xavier_(self.embeddings, self.plan.gain(Role.ROUTER), self.plan.xavier, "embeddings")
        self.log_temperature.fill_(log(self.moe.starting_temperature))

    @property
    def temperature(self) -> Tensor:
        return self.log_temperature.clamp(min=log(SMALLEST_TEMPERATURE)).exp()

    def score(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        cosines = F.linear(_directions(F.linear(tokens, self.weight)), _directions(self.embeddings))
        return cosines / self.temperature, cosines / self.moe.starting_temperature


class LinearRouter(Router):
    """The logits W h. weight: [experts, dim]."""

    def __init__(self, moe: MoE, dim: int, plan: Plan) -> None:
        super().__init__(moe, plan)
        self.weight = nn.Parameter(torch.empty(moe.experts, dim, dtype=_precise()))

    def fill(self, noise: Noise) -> None:
        super().fill(noise)
        noise.xavier_(self.weight, self.plan.gain(Role.ROUTER), self.plan.xavier, "weight")

    @property
    def temperature(self) -> Tensor:
        return self.weight.new_ones(())

    def score(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(tokens, self.weight)
        return logits, logits


def _directions(vectors: Tensor) -> Tensor:
    """Each divided by its norm; one of padding may be 0, where the norm itself could not be differentiated twice."""
    return vectors / vectors.square().sum(dim=-1, keepdim=True).clamp_min(SMALLEST_NORM**2).sqrt()


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def _precise(dtype: torch.dtype | None = None) -> torch.dtype:
    return torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)


def make_router(moe: MoE, dim: int, plan: Plan) -> Router:
    """The router that the options ask for."""
    return {"xmoe": CosineRouter, "linear": LinearRouter}[moe.router](moe, dim, plan)
