"""The feed-forward sublayer's function."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kilolayer.layers.function import Function
from kilolayer.layers.hooks import is_heard
from kilolayer.layers.norm import is_fused, make_norm
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.projection import Projection
from kilolayer.layers.scale import make_shift
from kilolayer.operators.relu_network import relu_network
from kilolayer.operators.relu_product import can_fuse_relu_product, normed_relu_product, relu_product
from kilolayer.recipes.base import Plan, Role


class SwiGLU(nn.Module):
    """[..., 2 d] to [..., d]: the first half, through SiLU, gates the second."""

    def forward(self, x: Tensor) -> Tensor:
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value


ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "swiglu": SwiGLU}


class FeedForward(Function):
    """W_2 phi(W_1 x), with the inner norm and the shifts of the plan. [batch, length, dim] to the same."""

    def __init__(
        self, options: LayerOptions, plan: Plan, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        gated = options.activation == "swiglu"
        parts = [(Role.FFN_IN, options.ffn_dim)] * (2 if gated else 1)
        self.input_shift = make_shift(plan.shifts, device, dtype)
        self.input = Projection(options.dim, parts, plan, device, dtype)
        self.activation_shift = make_shift(plan.shifts, device, dtype)
        self.activation = ACTIVATIONS[options.activation]()
        self.dropout = nn.Dropout(options.activation_dropout) if options.activation_dropout else nn.Identity()
        self.inner_norm = make_norm(plan.inner_norm, options.ffn_dim, options, device, dtype)
        self.output_shift = make_shift(plan.shifts, device, dtype)
        self.output = Projection(options.ffn_dim, [(Role.FFN_OUT, options.dim)], plan, device, dtype)

    def forward(self, x: Tensor, *seen: Any, biased: bool = True) -> Tensor:
        weight, bias = self.input.weight, self.input.bias
        if bias is None or not self._is_one_unit(x):
            return super().forward(x, *seen, biased=biased)
        return relu_network(x.to(weight.dtype), weight, bias, self.output.weight, self.output.bias if biased else None)

    def hidden(self, x: Tensor) -> Tensor:
        return self.output_shift(self._widen(self.input_shift(x)))

    def _widen(self, x: Tensor) -> Tensor:
        """N( phi(W_1 x) ), with dropout before the norm."""
        weight, bias, norm = self.input.weight, self.input.bias, self.inner_norm
        if bias is None or not self._rectifies_in_product(x):
            return norm(self.dropout(self.activation(self.activation_shift(self.input(x)))))
        x = x.to(weight.dtype)
        if is_fused(norm, x.device, x.dtype) and isinstance(self.dropout, nn.Identity):
            return normed_relu_product(x, weight, bias, norm.weight, norm.bias, norm.eps)[0]
        return norm(self.dropout(relu_product(x, weight, bias)))

    def _rectifies_in_product(self, x: Tensor) -> bool:
        """Whether the first product can apply its bias and a ReLU where it is written."""
        plain = isinstance(self.activation, nn.ReLU) and isinstance(self.activation_shift, nn.Identity)
        return plain and can_fuse_relu_product(x.device, self.input.weight.dtype)

    def _is_one_unit(self, x: Tensor) -> bool:
        """Whether nothing but such a ReLU stands between the products, nobody listens to these, and gradients are asked."""
        alone = all(isinstance(each, nn.Identity) for each in (self.dropout, self.inner_norm))
        plain = all(type(each) is Projection and not is_heard(each) for each in (self.input, self.output))
        return alone and plain and torch.is_grad_enabled() and self._rectifies_in_product(x)
