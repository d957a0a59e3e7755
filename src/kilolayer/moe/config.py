"""The configuration of experts: the option `moe=`, and the table [model.moe] of a configuration file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kilolayer.config import bounded, check, strict_class
from kilolayer.errors import OptionError, UnusedOptionError

STARTING_TEMPERATURE = {"softmax": 0.3, "sigmoid": 0.07}  # X-MoE (Chi et al. 2022)
SMALLEST_TEMPERATURE = 0.01  # lower bound of the learned temperature, as in Tutel's cosine gate
BALANCE = 0.01


@strict_class
@dataclass(frozen=True, kw_only=True)
class MoE:
    """Experts that replace feed-forward networks, and how tokens are routed to them."""

    experts: int = bounded(64, least=1, most=2**16)
    """Number of experts in each sparse layer; each is as wide as the feed-forward network that it replaces."""
    top_k: int = bounded(2, least=1, most=2**16)
    """Number of experts that each token is sent to."""
    every: int = bounded(2, least=1, most=10_000)
    """One layer in this many has experts; 2: layers 2, 4, 6, ..."""
    router: Literal["xmoe", "linear"] = "xmoe"
    """How tokens are matched to experts: by cosine similarity in a low dimension (X-MoE), or by a linear map."""
    gate: Literal["softmax", "sigmoid"] = "softmax"
    """Turns X-MoE's scores into weights; a linear router always uses softmax."""
    router_dim: int | None = bounded(None, least=1, most=2**20)
    """Dimension in which X-MoE compares tokens and experts. Default: half the number of experts, at least 2 (in one dimension a
    cosine is 1 or -1, and nothing could be learned)."""
    temperature: float | None = bounded(None, least=SMALLEST_TEMPERATURE, most=1e6)
    """Initial value of X-MoE's learned temperature. Default: 0.3, or 0.07 with the sigmoid gate."""
    second: Literal["all", "random", "sampling"] = "all"
    """Which tokens are sent to their second expert in training: all; random: with a probability that grows with the expert's
    weight; sampling: all, but the second expert is drawn by its probability."""
    capacity: float | None = bounded(None, above=0, most=1e6)
    """Maximum number of assignments that an expert accepts in training, as a multiple of an even share; the rest are dropped.
    Default: no limit."""
    balance: float | None = bounded(None, least=0, most=1e6)
    """Weight of the load-balancing loss. Default: 0.01, or 0 with loss_free."""
    z_loss: float = bounded(0.0, least=0, most=1e6)
    """Weight of the router z-loss, which keeps the router's logits small; 1e-3 is usual."""
    loss_free: float = bounded(0.0, least=0, below=1)
    """Step size of the router biases that balance the load without a loss; 1e-3 is usual, 0 turns them off."""

    def __post_init__(self) -> None:
        check(self)
        self._check_router()
        self._check_choice()

    @property
    def compared_dim(self) -> int:
        """The dimension in which X-MoE compares tokens and experts."""
        return self.router_dim or max(2, self.experts // 2)

    @property
    def starting_temperature(self) -> float:
        """The initial value of X-MoE's temperature."""
        return self.temperature or STARTING_TEMPERATURE[self.gate]

    @property
    def balance_weight(self) -> float:
        """The weight of the balance loss."""
        if self.balance is None:
            return 0.0 if self.loss_free else BALANCE
        return self.balance

    def _check_router(self) -> None:
        if self.router != "linear":
            return
        defaults = {"gate": "softmax", "router_dim": None, "temperature": None}
        for name, default in defaults.items():
            if getattr(self, name) != default:
                raise UnusedOptionError(
                    f"{name}={getattr(self, name)!r} has no effect on a linear router",
                    where="moe",
                    fix='remove it, or choose router="xmoe"',
                    unused=name,
                    beside=("router",),
                )

    def _check_choice(self) -> None:
        if self.top_k > self.experts:
            raise OptionError(
                f"top_k={self.top_k}, but there are {self.experts} experts",
                where="moe",
                fix=f"top_k must be at most {self.experts}",
            )
        if self.second != "all" and self.top_k != 2:
            raise UnusedOptionError(
                f"second={self.second!r} has no effect with top_k={self.top_k}",
                where="moe",
                fix="remove it, or set top_k=2",
                unused="second",
                beside=("top_k",),
            )
        if self.second == "sampling" and self.loss_free:
            raise UnusedOptionError(
                'second="sampling" ignores the biases of loss_free',
                where="moe",
                fix='choose second="all" or "random", or remove loss_free',
                unused="loss_free",
                beside=("second",),
                either=True,
            )
