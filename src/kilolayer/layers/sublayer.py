"""The residual equation that every recipe fills in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kilolayer.errors import OptionError
from kilolayer.layers.hooks import is_heard
from kilolayer.layers.initialise import Noise
from kilolayer.layers.norm import LayerNorm, RMSNorm, is_fused, make_norm
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.routing import Routing
from kilolayer.layers.scale import factor_of, make_scale
from kilolayer.layers.state import State
from kilolayer.operators.fused_norm import residual_norm
from kilolayer.recipes.base import Plan


class DropPath(nn.Module):
    """Drops a branch for whole samples while training; what stays is scaled so that the mean is kept."""

    chance: Tensor

    def __init__(self, chance: float, device: torch.device | None = None) -> None:
        super().__init__()
        self.start = chance
        # A tensor: one compiled layer serves all layers, and a number of each layer's own would be compiled in.
        self.register_buffer("chance", torch.full((), chance, device=device), persistent=False)

    def fill(self, noise: Noise) -> None:
        self.chance.fill_(self.start)

    def forward(self, x_BLD: Tensor) -> Tensor:
        if not self.training:
            return x_BLD
        kept = torch.rand(x_BLD.shape[0], 1, 1, device=x_BLD.device) >= self.chance
        return x_BLD * (kept / (1 - self.chance)).to(x_BLD.dtype)


class Sublayer(nn.Module):
    """y = N_out( skip * x + branch * N_post( f( in_scale * N_pre(x) ) ) ), with dropout on the branch.

    `layer_branch` is the branch scale of a recipe that shares one among a layer's sublayers; the block owns it.
    """

    f: Any
    branch: nn.Module

    def __init__(
        self,
        f: nn.Module,
        options: LayerOptions,
        plan: Plan,
        *,
        drop_path: float = 0.0,
        layer_branch: nn.Module | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.plan = plan
        self.f = f
        self.pre_norm = make_norm(plan.pre_norm, options.dim, options, device, dtype)
        self.post_norm = make_norm(plan.post_norm, options.dim, options, device, dtype)
        self.out_norm = make_norm(plan.out_norm, options.dim, options, device, dtype)
        self.in_scale = make_scale(plan.in_scale, options.dim, device, dtype)
        self.skip = make_scale(plan.skip, options.dim, device, dtype)
        self.dropout = nn.Dropout(options.dropout) if options.dropout else nn.Identity()
        self.drop_path = DropPath(drop_path, device) if drop_path else nn.Identity()
        if layer_branch is None:
            self.branch = make_scale(plan.branch, options.dim, device, dtype)
        else:
            # Not registered here: its one parameter has one name, the block's.
            object.__setattr__(self, "branch", layer_branch)

    def set_out_eps(self, eps: float) -> None:
        """Give the norm on the residual an eps of its own, as the first of a folded stack has."""
        if not isinstance(self.out_norm, nn.LayerNorm | nn.RMSNorm):
            raise OptionError("an eps of its own has no effect where no norm stands on the residual", fix="remove it")
        self.out_norm.eps = eps

    @property
    def opening(self) -> nn.Module | None:
        """The norm that f begins with, where the sublayer before may apply it: f reads nothing else, and nobody listens."""
        alone = self.plan.pre_norm and self.plan.in_scale == 1.0
        return self.pre_norm if alone and not is_heard(self.pre_norm) else None

    def forward(self, x: State, *seen: Any, following: nn.Module | None = None) -> Any:
        """[batch, length, dim] to the same; `seen` is what f takes besides its input, `following` the next one's `opening`."""
        if not self.is_fused(x.precise, self.f.output.weight.dtype, following):
            return self.join(x, self.f(self.read(x), *seen))
        if not isinstance(self.post_norm, nn.Identity):
            return self.join_fused(x, self.post_norm(self.f(self.read(x), *seen)), None, following)
        y = self.f(self.read(x), *seen, biased=False)
        return self.join_fused(x, y, self.f.output.bias, following)

    def read(self, x: State) -> Tensor:
        """in_scale * N_pre(x), what f reads."""
        if x.normed is not None:
            return x.normed
        prepared = self.plan.pre_norm or self.plan.in_scale != 1.0
        return self.in_scale(self.pre_norm(x.precise if prepared else x.rounded))

    def join(self, x: State, y: Tensor) -> State:
        """N_out( skip * x + branch * N_post(y) ), y the output of f."""
        branch = self.branch(self.drop_path(self.dropout(self.post_norm(y))))
        return State.of(self.out_norm(self.skip(x.precise) + branch))

    def join_fused(self, x: State, y: Tensor, bias: Tensor | None, following: nn.Module | None) -> State:
        """N_out( skip * x + branch * (y + bias) ) in one pass, or the sum and the norm that follows it.

        y: after N_post; bias: that of f's last product, where y does not have it yet.
        """
        norm, skip, branch = self._norm_of_sum(following), factor_of(self.skip), factor_of(self.branch)
        assert isinstance(norm, LayerNorm | RMSNorm)
        assert not isinstance(branch, Tensor)
        number, vector = (1.0, skip) if isinstance(skip, Tensor) else (skip, None)
        keeps_sum = norm is following
        precise, rounded, _ = residual_norm(
            x.precise, y, bias, vector, number, branch, norm.weight, norm.bias, norm.eps, keeps_sum
        )
        return State.of(precise, rounded) if keeps_sum else State(precise, rounded)

    def _norm_of_sum(self, following: nn.Module | None) -> nn.Module | None:
        """Of the sum of skip and branch: this sublayer's own, or the next one's."""
        return following if isinstance(self.out_norm, nn.Identity) else self.out_norm

    def is_fused(self, x: Tensor, dtype: torch.dtype, following: nn.Module | None) -> bool:
        """Whether one kernel adds what f computes in `dtype` to x and normalises it: nothing is dropped, nobody listens."""
        norm, skip, branch = self._norm_of_sum(following), factor_of(self.skip), factor_of(self.branch)
        return (
            is_fused(norm, x.device, dtype)
            and norm.weight.dtype == x.dtype
            and not (isinstance(skip, Tensor) and skip.dim() == 0)
            and not isinstance(branch, Tensor)
            and not any(drop.training for drop in (self.dropout, self.drop_path) if not isinstance(drop, nn.Identity))
            and not any(map(is_heard, self.children()))
        )


class RoutedSublayer(Sublayer):
    """A sublayer whose f sends each token to some of its experts, and tells how."""

    @property
    def opening(self) -> None:
        """The router reads what is precise; experts are chosen by small differences."""

    def forward(self, x: State, *seen: Any, following: nn.Module | None = None) -> tuple[State, Routing]:
        y, routing = self.f(self.in_scale(self.pre_norm(x.precise)), *seen)
        if self.is_fused(x.precise, y.dtype, following):
            return self.join_fused(x, self.post_norm(y), None, following), routing
        return self.join(x, y), routing
