"""The inputs that all layers of a stack share, computed once per forward pass: masks, rotary tables, the encoder's output."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from kilolayer.errors import InputError
from kilolayer.layers.cache import Cache
from kilolayer.layers.mask import Mask, cross_mask, self_mask
from kilolayer.layers.position import Positions, Rotation, position_ids


@dataclass(frozen=True)
class Sequences:
    """A batch of embedded sequences.

    states: [batch, length, dim]. real: bool [batch, length], False at padding; None if nothing is padded.
    segments: int [batch, length], the document of each position in packed rows; None if each row is one document.
    coordinates: int [1 or batch, length, 2], row and column of each position in an image; None in a text.
    """

    states: Tensor
    real: Tensor | None = None
    segments: Tensor | None = None
    coordinates: Tensor | None = None


@dataclass(frozen=True)
class AttentionContext:
    """What every layer of a stack reads in addition to its state.

    mask: for self-attention. rotation: rotary tables; None with other positions.
    past: the number of positions already in the cache; with a cache of fixed size, the indices of the entries to write.
    memory: [batch, source, dim], the encoder's output; None without one, or if the caches hold its keys and values.
    memory_mask: for cross-attention. real: bool [batch, length], False at padding; None if nothing is padded.
    """

    mask: Mask
    rotation: Rotation | None = None
    past: int | Tensor = 0
    memory: Tensor | None = None
    memory_mask: Mask | None = None
    real: Tensor | None = None

    def recording(self, largest_logit: Tensor, of_memory: Tensor) -> Self:
        """The same view, in which self- and cross-attention raise these numbers, fp32 [], to their largest logit."""
        mask = replace(self.mask, largest_logit=largest_logit, real=self.real)
        if self.memory_mask is None:
            return replace(self, mask=mask)
        return replace(self, mask=mask, memory_mask=replace(self.memory_mask, largest_logit=of_memory, real=self.real))


@dataclass(frozen=True)
class TokenPositions:
    """The positions of the new tokens and of everything that they may attend to.

    ids: int [1 or batch, new], or [1 or batch, new, 2] in an image; key_ids: the same for all; mask: of self-attention, before
    any position bias.
    """

    ids: Tensor
    key_ids: Tensor
    mask: Mask


def number_positions(positions: Positions, inputs: Sequences, cache: Cache | None, *, causal: bool) -> TokenPositions:
    """Number the positions of a batch, after those already in `cache`, and extend the cache's padding mask by them."""
    length, device = inputs.states.shape[1], inputs.states.device
    if inputs.coordinates is not None:
        return TokenPositions(inputs.coordinates, inputs.coordinates, Mask())
    if cache is not None and inputs.segments is not None:
        raise InputError("packed documents cannot be decoded step by step", fix="give each document its own row")
    if cache is not None:
        cache.check_rows(inputs.states.shape[0])
    if cache is not None and cache.seen is not None:
        positions.check_length(len(cache.widths) + 1)
        ids, seen = cache.extend_branches(length)
        return TokenPositions(ids, cache.position_ids().to(device), Mask(values=seen[:, None]))
    past = cache.length if cache else 0
    if inputs.segments is None:  # checked before the cache is extended, so that an error leaves it unchanged
        positions.check_length(past + length)
    real = cache.extend(length, inputs.real) if cache else inputs.real
    everywhere = position_ids(past + length, device=device, real=real, segments=inputs.segments)
    if inputs.segments is not None:
        positions.check_length(everywhere)
    mask = self_mask(length, causal=causal, device=device, real=real, segments=inputs.segments, past=past)
    return TokenPositions(everywhere[:, past:], everywhere, mask)


def make_context(
    positions: Positions,
    token_positions: TokenPositions,
    dtype: torch.dtype,
    *,
    past: int | Tensor = 0,
    memory: Tensor | None = None,
    memory_mask: Mask | None = None,
    real: Tensor | None = None,
) -> AttentionContext:
    """Build the context for layers whose matrix products are in `dtype`; bool masks are converted to float biases."""
    mask = token_positions.mask
    if positions.bias is not None:
        mask = mask.with_bias(positions.bias(token_positions.ids, token_positions.key_ids))
    memory_mask = None if memory_mask is None else memory_mask.as_bias(dtype)
    return AttentionContext(
        mask.as_bias(dtype), make_rotation(positions, token_positions, dtype), past, memory, memory_mask, real
    )


def make_rotation(positions: Positions, token_positions: TokenPositions, dtype: torch.dtype) -> Rotation | None:
    """The rotary tables of the new positions; None if the model does not use rotary positions or xPos."""
    return None if positions.rotary is None else positions.rotary(token_positions.ids, dtype)


def mask_of_memory(inputs: Sequences, memory: Sequences) -> Mask:
    """The cross-attention mask of a batch of targets over its sources."""
    return cross_mask(real=memory.real, segments=inputs.segments, memory_segments=memory.segments)
