"""Attention masks, in the form that `F.scaled_dot_product_attention` (SDPA) takes.

No function here reads a value back from the device, so none of them synchronizes with a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """Which keys each query may attend to.

    causal: a plain causal mask; kept as a flag, because it lets SDPA choose its fastest kernel.
    values: broadcasts to [batch, heads, queries, keys]; bool, True where a query may attend, or a float bias on the scores.
    weights: a list to which each attention appends its weights, [batch, heads, queries, keys]; None unless requested.
    largest_logit: fp32 [], raised to the largest logit of the attention that reads this mask; None unless it is measured.
    real: bool [batch, queries], False at padding, whose logits are not measured.
    """

    causal: bool = False
    values: Tensor | None = None
    weights: list[Tensor] | None = None
    largest_logit: Tensor | None = None
    real: Tensor | None = None

    def part(self, rows: int, queries: slice, keys: int, device: torch.device) -> Mask:
        """The mask of some queries of the first `rows` rows, over `keys` keys."""
        values = self.values
        if self.causal:
            values = causal_grid(queries.stop - queries.start, keys, queries.start, device)
        elif values is not None:
            values = values[:rows, :, queries if values.shape[-2] > 1 else slice(None)]
        return Mask(values=values)

    def with_bias(self, bias: Tensor) -> Mask:
        """The same mask with a float bias [1 or batch, heads, queries, keys] added to the scores."""
        if self.causal:
            allowed = causal_grid(bias.shape[-2], bias.shape[-1], 0, bias.device)
        elif self.values is not None:
            allowed = self.values
        else:
            return Mask(values=bias)
        return Mask(values=bias.masked_fill(~allowed, float("-inf")))

    def as_bias(self, dtype: torch.dtype) -> Mask:
        """The same mask as a float bias, converted once: SDPA would convert a bool mask again in every layer."""
        if self.values is None or self.values.dtype == dtype:
            return self
        if self.values.dtype != torch.bool:
            return Mask(values=self.values.to(dtype))
        zeros = torch.zeros(self.values.shape, dtype=dtype, device=self.values.device)
        return Mask(values=zeros.masked_fill_(~self.values, float("-inf")))


def causal_grid(queries: int, keys: int, past: int, device: torch.device) -> Tensor:
    """Bool [queries, keys]: query i, at position past + i, may attend to the keys 0 to past + i."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(past)


def self_mask(
    length: int, *, causal: bool, device: torch.device, real: Tensor | None, segments: Tensor | None, past: int = 0
) -> Mask:
    """The self-attention mask of `length` new positions over `past` cached positions and themselves.

    real: bool [batch, past + length], False at padding. segments: int [batch, length], the document of each position.
    """
    if real is None and segments is None:
        if not causal or (past and length == 1):
            return Mask()
        return Mask(values=causal_grid(length, past + length, past, device)[None, None]) if past else Mask(causal=True)
    if not causal and segments is None:
        assert real is not None
        return Mask(values=_all_if_empty(real[:, None, None, :]))
    grid = causal_grid(length, past + length, past, device)
    allowed = grid if causal else torch.ones_like(grid)
    if real is not None:
        allowed = allowed & real[:, None, None, :]
    if segments is not None:
        allowed = allowed & (segments[:, None, :, None] == segments[:, None, None, :])
    # A position with nothing to attend to (leading padding) would give 0/0 in the softmax, so it attends to itself.
    itself = grid & ~grid.tril(past - 1)
    return Mask(values=allowed | (itself & ~allowed.any(dim=-1, keepdim=True)))


def cross_mask(*, real: Tensor | None, segments: Tensor | None, memory_segments: Tensor | None) -> Mask:
    """The cross-attention mask of target positions over source positions.

    real: bool [batch, source], False at padding. segments: int [batch, target]; memory_segments: int [batch, source]. A target
    document without a source document attends to all source positions of its row.
    """
    allowed = None if real is None else real[:, None, None, :]
    if segments is not None and memory_segments is not None:
        same = segments[:, None, :, None] == memory_segments[:, None, None, :]
        allowed = same if allowed is None else allowed & same
    return Mask(values=None if allowed is None else _all_if_empty(allowed))


def _all_if_empty(allowed: Tensor) -> Tensor:
    # A row with only padding would give 0/0 in the softmax, so it attends to all of the padding.
    return allowed | ~allowed.any(dim=-1, keepdim=True)
