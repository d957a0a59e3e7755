"""The feed-forward network, f(x) = W_2 N(phi(W_1 x + b_1)) + b_2, and its activations phi."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from kilolayer.layers.norms.base import make_norm
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.projection import Projection
from kilolayer.layers.scale import make_shift
from kilolayer.recipes.base import Plan
from kilolayer.recipes.role import Role


class SwiGLU(nn.Module):
    """SiLU(a) * b for the halves a, b of the last axis: [..., 2 d] to [..., d]."""

    def forward(self, x: Tensor) -> Tensor:
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value


ACTIVATIONS = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "silu": nn.SiLU,
    "swiglu": SwiGLU,
}


class FeedForward(nn.Module):
    """W_2 N(phi(W_1 x)): [batch, length, dim] to [batch, length, dim], with ffn_dim hidden units.

    The inner norm N, and the learned scalar shifts before W_1, phi and W_2, are identities unless the plan has them.
    """

    def __init__(self, options: LayerOptions, plan: Plan) -> None:
        super().__init__()
        gated = options.activation == "swiglu"
        parts = [(Role.FFN_IN, options.ffn_dim)] * (2 if gated else 1)
        self.input_shift = make_shift(plan.shifts)
        self.input = Projection(options.dim, parts, plan)
        self.activation_shift = make_shift(plan.shifts)
        self.activation = ACTIVATIONS[options.activation]()
        self.dropout = nn.Dropout(options.activation_dropout) if options.activation_dropout else nn.Identity()
        self.inner_norm = make_norm(plan.inner_norm, options.ffn_dim, options)
        self.output_shift = make_shift(plan.shifts)
        self.output = Projection(options.ffn_dim, [(Role.FFN_OUT, options.dim)], plan)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(self.activation_shift(self.input(self.input_shift(x))))
        return self.output(self.output_shift(self.inner_norm(self.dropout(hidden))))
