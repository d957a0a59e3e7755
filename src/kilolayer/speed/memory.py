"""The encoder's output, rounded once for all layers of a decoder."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor


class Memory(NamedTuple):
    """The encoder's output [batch, source, dim], and the same rounded once for all layers to the dtype of the products.

    Gradients go to `precise`, in whose dtype those of all layers are summed. Without rounding, both are the same tensor.
    """

    precise: Tensor
    rounded: Tensor

    @classmethod
    def of(cls, states: Tensor, dtype: torch.dtype) -> Self:
        """The memory for layers whose products are in `dtype`."""
        return cls(states, states if states.dtype == dtype else states.detach().to(dtype))

    def read(self) -> Tensor:
        """The tensor that a layer reads."""
        return self.precise if self.rounded is self.precise else _Rounded.apply(self.precise, self.rounded)


class _Rounded(torch.autograd.Function):
    """Returns `rounded`, and passes its gradient on to `precise`."""

    @staticmethod
    def forward(ctx: Any, precise: Tensor, rounded: Tensor) -> Tensor:
        ctx.dtype = precise.dtype
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (gradient,) = grad_outputs
        return gradient.to(ctx.dtype), None
