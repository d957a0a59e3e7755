"""What each position may look at, in the form that SDPA takes. No function here reads a value back from the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """`causal` alone lets SDPA choose its fastest kernel.

    `values` broadcasts to [batch, heads, queries, keys]: bool, True where a query may look, or a float bias.
    `weights`: where each attention under this mask leaves its weights, [batch, heads, queries, keys], if they are asked for.
    """

    causal: bool = False
    values: Tensor | None = None
    weights: list[Tensor] | None = None

    def with_bias(self, bias: Tensor) -> Mask:
        """The same view with a float bias [1, heads, queries, keys] on the scores."""
        if self.causal:
            allowed = causal_grid(bias.shape[-2], bias.shape[-1], 0, bias.device)
        elif self.values is not None:
            allowed = self.values
        else:
            return Mask(values=bias)
        return Mask(values=bias.masked_fill(~allowed, float("-inf")))

    def as_bias(self, dtype: torch.dtype) -> Mask:
        """The same view as a float bias: SDPA would turn a bool mask into one in every layer."""
        if self.values is None or self.values.dtype == dtype:
            return self
        if self.values.dtype != torch.bool:
            return Mask(values=self.values.to(dtype))
        zeros = torch.zeros(self.values.shape, dtype=dtype, device=self.values.device)
        return Mask(values=zeros.masked_fill_(~self.values, float("-inf")))


def causal_grid(queries: int, keys: int, past: int, device: torch.device) -> Tensor:
    """Bool [queries, keys]: query i, at position past + i, may look at the keys up to its own."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(past)


def self_mask(
    length: int, *, causal: bool, device: torch.device, real: Tensor | None, segments: Tensor | None, past: int = 0
) -> Mask:
    """The view of `length` new positions on themselves and on `past` cached ones.

    real: bool [batch, past + length], False at padding. segments: int [batch, length], the document of each position.
    """
    if real is None and segments is None:
        if not causal or (past and length == 1):
            return Mask()
        return Mask(values=causal_grid(length, past + length, past, device)) if past else Mask(causal=True)
    if not causal and segments is None:
        assert real is not None
        return Mask(values=_never_empty(real[:, None, None, :]))
    grid = causal_grid(length, past + length, past, device)
    allowed = grid if causal else torch.ones_like(grid)
    if real is not None:
        allowed = allowed & real[:, None, None, :]
    if segments is not None:
        allowed = allowed & (segments[:, None, :, None] == segments[:, None, None, :])
    # A position that could look nowhere (leading padding) would divide 0 by 0 in the softmax: it sees itself.
    itself = grid & ~grid.tril(past - 1)
    return Mask(values=allowed | (itself & ~allowed.any(dim=-1, keepdim=True)))


def cross_mask(*, real: Tensor | None, segments: Tensor | None, memory_segments: Tensor | None) -> Mask:
    """The view of a target on its source.

    real: bool [batch, source], False at padding. segments: int [batch, target]; memory_segments: int [batch, source]. A target
    document without a source sees all of the row's.
    """
    allowed = None if real is None else real[:, None, None, :]
    if segments is not None and memory_segments is not None:
        same = segments[:, None, :, None] == memory_segments[:, None, None, :]
        allowed = same if allowed is None else allowed & same
    return Mask(values=None if allowed is None else _never_empty(allowed))


def _never_empty(allowed: Tensor) -> Tensor:
    # A row of padding alone would divide 0 by 0 in the softmax: it sees all of that padding.
    return allowed | ~allowed.any(dim=-1, keepdim=True)
