"""The residual equation that every recipe fills in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kilolayer.errors import OptionError
from kilolayer.layers.initialise import Noise
from kilolayer.layers.norm import make_norm
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.routing import Routing
from kilolayer.layers.scale import make_scale
from kilolayer.layers.stream import Pair
from kilolayer.recipes.base import Plan


class DropPath(nn.Module):
    """Drops a branch for whole samples while training; what stays is scaled so that the mean is kept."""

    chance: Tensor

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.start = chance
        # A tensor: one compiled layer serves all layers, and a number of each layer's own would be compiled in.
        self.register_buffer("chance", torch.full((), chance, dtype=torch.float32), persistent=False)

    def fill(self, noise: Noise) -> None:
        self.chance.fill_(self.start)

    def factors(self, batch: int) -> Tensor:
        """What each sample's branch is multiplied by, 0 or 1 / (1 - chance), drawn anew: fp32 [batch]."""
        kept = torch.rand(batch, device=self.chance.device) >= self.chance
        return kept / (1 - self.chance)

    def forward(self, x_BLD: Tensor) -> Tensor:
        if not self.training:
            return x_BLD
        return x_BLD * self.factors(x_BLD.shape[0])[:, None, None].to(x_BLD.dtype)


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
    ) -> None:
        super().__init__()
        self.plan = plan
        self.f = f
        self.pre_norm = make_norm(plan.pre_norm, options.dim, options)
        self.post_norm = make_norm(plan.post_norm, options.dim, options)
        self.out_norm = make_norm(plan.out_norm, options.dim, options)
        self.in_scale = make_scale(plan.in_scale, options.dim)
        self.skip = make_scale(plan.skip, options.dim)
        self.dropout = nn.Dropout(options.dropout) if options.dropout else nn.Identity()
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        if layer_branch is None:
            self.branch = make_scale(plan.branch, options.dim)
        else:
            # Not registered here: its one parameter has one name, the block's.
            object.__setattr__(self, "branch", layer_branch)

    def set_out_eps(self, eps: float) -> None:
        """Give the norm on the residual an eps of its own, as the first of a folded stack has."""
        if not isinstance(self.out_norm, nn.LayerNorm | nn.RMSNorm):
            raise OptionError("an eps of its own has no effect where there is no norm on the residual", fix="remove it")
        self.out_norm.eps = eps

    def forward(self, x: Any, *seen: Any) -> Any:
        """[batch, length, dim] to the same; `seen` is what f takes besides its input."""
        return self.join(x, self.f(self.read(x), *seen))

    def read(self, x: Any) -> Tensor:
        """What f reads."""
        return self.in_scale(self.pre_norm(x))

    def join(self, x: Any, y: Tensor) -> Any:
        """The residual and what f made of it, y, in one."""
        return self.out_norm(self.skip(x) + self.scaled(y))

    def scaled(self, y: Tensor) -> Tensor:
        """The branch as it joins the residual."""
        return self.branch(self.drop_path(self.dropout(self.post_norm(y))))


class RoutedSublayer(Sublayer):
    """A sublayer whose f sends each token to some of its experts, and also returns how."""

    def forward(self, x: Any, *seen: Any) -> tuple[Any, Routing]:
        y, routing = self.f(self.read(x), *seen)
        return self.join(x, y), routing


class PairSublayer(Sublayer):
    """A sublayer of a stream with a second state z: y = N_out( skip * x + b + second_in * z ), z' = z + second_out * b."""

    def read(self, x: Pair) -> Tensor:
        return super().read(x.x)

    def join(self, x: Pair, y: Tensor) -> Pair:
        total, second = self.add(x, self.scaled(y))
        return Pair(self.out_norm(total), second)

    def add(self, x: Pair, branch: Tensor) -> Pair:
        """What N_out normalises, and the second state for the next sublayer."""
        total, second = self.skip(x.x) + branch, x.second
        if self.plan.second_in:
            total = torch.add(total, second, alpha=self.plan.second_in)
        if self.plan.second_out:
            second = torch.add(second, branch, alpha=self.plan.second_out)
        return Pair(total, second)


class RoutedPairSublayer(PairSublayer, RoutedSublayer):
    """As `PairSublayer`, with experts."""
