"""The residual equation, in which recipes choose the norms and scales:

    y = N_out( skip * x + branch * N_post( f( in_scale * N_pre(x) ) ) )

f is attention or a feed-forward network. Post-LN has N_out only, Pre-LN has N_pre only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kilolayer.errors import OptionError
from kilolayer.layers.initialize import KeyedGenerator
from kilolayer.layers.multiway import each_way
from kilolayer.layers.norms.base import Norm, make_norm
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.routing import Routing
from kilolayer.layers.scale import make_scale
from kilolayer.layers.stream import LayerOutput, LayerState, Pair, state_of
from kilolayer.recipes.base import Plan


class DropPath(nn.Module):
    """Stochastic depth: in training, drops the branch of whole samples and divides the others by the probability to be kept."""

    p: Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        self.init = p
        # A tensor, because one compiled layer serves all layers; a Python number would be compiled in as a constant.
        self.register_buffer("p", torch.full((), p, dtype=torch.float32), persistent=False)

    def reset_parameters(self, generator: KeyedGenerator | None = None) -> None:
        self.p.fill_(self.init)

    def factors(self, batch: int) -> Tensor:
        """Draw a factor for the branch of each sample, 0 or 1 / (1 - p): fp32 [batch]."""
        kept = torch.rand(batch, device=self.p.device) >= self.p
        return kept / (1 - self.p)

    def forward(self, x_BLD: Tensor) -> Tensor:
        if not self.training:
            return x_BLD
        return x_BLD * self.factors(x_BLD.shape[0])[:, None, None].to(x_BLD.dtype)


class Sublayer(nn.Module):
    """y = N_out( skip * x + branch * N_post( f( in_scale * N_pre(x) ) ) ), with dropout after N_post.

    x and y: [batch, length, dim]. Norms and scales that the plan does not have are identities.
    layer_branch: the branch scale of a recipe that shares one among the sublayers of a layer; the block owns it.
    """

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
        for norm in each_way(self.out_norm):
            if not isinstance(norm, Norm):
                raise OptionError("an eps of its own has no effect where there is no norm on the residual", fix="remove it")
            norm.eps = eps

    def forward(self, x: Tensor, *inputs: object) -> Tensor:
        """[batch, length, dim] to the same shape; inputs: the further arguments of f, such as masks."""
        y = self.post_norm(self.f(self.in_scale(self.pre_norm(x)), *inputs))
        return self.out_norm(self.skip(x) + self.branch(self.drop_path(self.dropout(y))))


class ExtendedSublayer(Sublayer):
    """A sublayer that passes on more than x: a second state z, the routing of the experts in f, or both.

        b = branch * N_post( f( in_scale * N_pre(x) ) )
        y = N_out( skip * x + b + second_in * z ),    z' = z + second_out * b

    x, y and z: [batch, length, dim]. With a second state, x and y are a `Pair`; with experts, the output is a `LayerOutput`.
    """

    def forward(self, x: LayerState, *inputs: object) -> LayerState | LayerOutput:  # pyright: ignore[reportIncompatibleMethodOverride]
        y, routing = split_routing(self.f(self.in_scale(self.pre_norm(state_of(x))), *inputs))
        states = self.add(x, self.branch(self.drop_path(self.dropout(self.post_norm(y)))))
        return states if routing is None else LayerOutput(states, routing)

    def add(self, x: LayerState, branch: Tensor) -> LayerState:
        """y and, if x is a pair, z'."""
        if not isinstance(x, Pair):
            return self.out_norm(self.skip(x) + branch)
        total = add_scaled(self.skip(x.x) + branch, self.plan.second_in, x.second)
        return Pair(self.out_norm(total), add_scaled(x.second, self.plan.second_out, branch))


def split_routing(y: Tensor | tuple[Tensor, Routing]) -> tuple[Tensor, Routing | None]:
    """What f returns as (output, routing); the routing is None if f has no experts."""
    return y if isinstance(y, tuple) else (y, None)


def add_scaled(x: Tensor, factor: float, y: Tensor) -> Tensor:
    """x + factor * y; x itself if the factor is 0."""
    return torch.add(x, y, alpha=factor) if factor else x
