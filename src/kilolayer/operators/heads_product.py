"""Queries, keys and values of one product on a GPU, and a backward that passes once over their gradients.

Attention gives these gradients as tensors of their own; the products of the backward read them side by side, and the bias's is
their sum over all rows. One pass writes both. The forward is the plain product: its parts are views of it, as an operator could
not return them. On the CPU the operator runs plain formulas, which the kernel is tested against.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.operators import kernels

BLOCK_ROWS = 64
"""Rows of a sequence that one partial sum of the bias's gradient covers."""
MULTIPLE = 16
"""Head widths are multiples of it, so that the kernel may read whole vectors wherever a head lies."""


def can_fuse_heads_product(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether gradients of such heads can be joined in one pass here."""
    return dtype in (torch.bfloat16, torch.float16) and head_dim % MULTIPLE == 0 and kernels.run_on(device, "heads_product")


def heads_product(x: Tensor, weight: Tensor, bias: Tensor, rows: Sequence[int], head_dim: int) -> tuple[Tensor, ...]:
    """The parts of x W^T + b, each split into heads: [batch, heads, length, head width].

    x [batch, length, inputs]; weight [sum of rows, inputs]; bias [sum of rows]; rows: of each part of the weight.
    """
    return _HeadsProduct.apply(x, weight, bias, rows, head_dim)


@torch.library.custom_op("kilolayer::join_heads", mutates_args=(), device_types="cuda")
def join_heads(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The parts side by side with their heads, and the sum over rows.

    parts [batch, heads, length, head width] with any strides and each with heads of its own; joined [batch * length, width of
    all heads]; the sum [width of all heads].
    """
    from kilolayer.operators.heads_product_kernel import join
    from kilolayer.operators.partial_sums_kernel import add_up

    batch, _, length, _ = parts[0].shape
    joined, total = _empty_outputs(parts)
    sums = joined.new_empty(batch * -(-length // BLOCK_ROWS), 1, len(total), dtype=torch.float32)
    join([part if part.stride(-1) == 1 else part.contiguous() for part in parts], joined, sums, BLOCK_ROWS)
    add_up(sums, [total])
    return joined, total


@join_heads.register_kernel("cpu")
def _(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    joined = torch.cat([part.transpose(1, 2).flatten(2) for part in parts], dim=-1).flatten(0, 1)
    return joined, joined.sum(dim=0)


@join_heads.register_fake
def _(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    return _empty_outputs(parts)


def _empty_outputs(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    batch, _, length, head_dim = parts[0].shape
    width = sum(part.shape[1] for part in parts) * head_dim
    return parts[0].new_empty(batch * length, width), parts[0].new_empty(width)


class _HeadsProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, rows: Sequence[int], head_dim: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight)
        product = F.linear(x, weight, bias)
        return tuple(part.unflatten(-1, (-1, head_dim)).transpose(1, 2) for part in product.split(rows, dim=-1))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        joined, of_bias = join_heads(list(grad_outputs))
        return (joined @ weight).view(x.shape), joined.t() @ x.reshape(-1, x.shape[-1]), of_bias, None, None
