"""The residual equation, in which recipes choose the norms and scales:

    y = N_out( skip * x + branch * N_post( f( in_scale * N_pre(x) ) ) )

f is attention or a feed-forward network. Post-LN has N_out only, Pre-LN has N_pre only.
"""

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
    """Stochastic depth: in training, drops the branch of whole samples and divides the others by the probability to be kept."""

    chance: Tensor

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.start = chance
        # A tensor, because one compiled layer serves all layers; a Python number would be compiled in as a constant.
        self.register_buffer("chance", torch.full((), chance, dtype=torch.float32), persistent=False)

    def fill(self, noise: Noise) -> None:
        self.chance.fill_(self.start)

    def factors(self, batch: int) -> Tensor:
        """Draw a factor for the branch of each sample, 0 or 1 / (1 - chance): fp32 [batch]."""
        kept = torch.rand(batch, device=self.chance.device) >= self.chance
        return kept / (1 - self.chance)

    def forward(self, x_BLD: Tensor) -> Tensor:
        if not self.training:
            return x_BLD
        return x_BLD * self.factors(x_BLD.shape[0])[:, None, None].to(x_BLD.dtype)


class Sublayer(nn.Module):
    """y = N_out( skip * x + branch * N_post( f( in_scale * N_pre(x) ) ) ), with dropout after N_post.

    x and y: [batch, length, dim]. Norms and scales that the plan does not have are identities.
    layer_branch: the branch scale of a recipe that shares one among the sublayers of a layer; the block owns it.
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
            # Not registered as a submodule here, so that the shared parameter has one name, in the block.
            object.__setattr__(self, "branch", layer_branch)

    def set_out_eps(self, eps: float) -> None:
        """Set the eps of N_out, which differs in the first sublayer of a folded stack."""
        if not isinstance(self.out_norm, nn.LayerNorm | nn.RMSNorm):
            raise OptionError("an eps of its own has no effect where there is no norm on the residual", fix="remove it")
        self.out_norm.eps = eps

    def forward(self, x: Any, *seen: Any) -> Any:
        """[batch, length, dim] to the same shape; seen: the further arguments of f, such as masks."""
        return self.join(x, self.f(self.read(x), *seen))

    def read(self, x: Any) -> Tensor:
        """The input of f: in_scale * N_pre(x)."""
        return self.in_scale(self.pre_norm(x))

    def join(self, x: Any, y: Tensor) -> Any:
        """N_out(skip * x + scaled(y)), where y is the output of f."""
        return self.out_norm(self.skip(x) + self.scaled(y))

    def scaled(self, y: Tensor) -> Tensor:
        """branch * N_post(y), with dropout and drop path."""
        return self.branch(self.drop_path(self.dropout(self.post_norm(y))))


class RoutedSublayer(Sublayer):
    """A sublayer whose f is a mixture of experts and also returns its routing statistics."""

    def forward(self, x: Any, *seen: Any) -> tuple[Any, Routing]:
        y, routing = self.f(self.read(x), *seen)
        return self.join(x, y), routing


class PairSublayer(Sublayer):
    """A sublayer that also reads and updates a second state z:

        b = branch * N_post( f( in_scale * N_pre(x) ) )
        y = N_out( skip * x + b + second_in * z ),    z' = z + second_out * b

    x, y and z: [batch, length, dim].
    """

    def read(self, x: Pair) -> Tensor:
        return super().read(x.x)

    def join(self, x: Pair, y: Tensor) -> Pair:
        total, second = self.add(x, self.scaled(y))
        return Pair(self.out_norm(total), second)

    def add(self, x: Pair, branch: Tensor) -> Pair:
        """The input of N_out, and the second state for the next sublayer."""
        total, second = self.skip(x.x) + branch, x.second
        if self.plan.second_in:
            total = torch.add(total, second, alpha=self.plan.second_in)
        if self.plan.second_out:
            second = torch.add(second, branch, alpha=self.plan.second_out)
        return Pair(total, second)


class RoutedPairSublayer(PairSublayer, RoutedSublayer):
    """A `PairSublayer` whose f is a mixture of experts."""
