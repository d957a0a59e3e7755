"""What the layers of a stack see besides the state, made once a forward: masks, rotary tables, and the source."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kilolayer.errors import InputError
from kilolayer.layers.cache import Cache
from kilolayer.layers.mask import Mask, cross_mask, self_mask
from kilolayer.layers.position import Positions, Rotation, position_ids


@dataclass(frozen=True)
class Sequences:
    """A batch of embedded sequences.

    states [batch, length, dim]; real bool [batch, length], False at padding, None where there is none;
    segments int [batch, length], the document of each position, None where each row is one.
    """

    states: Tensor
    real: Tensor | None = None
    segments: Tensor | None = None


@dataclass(frozen=True)
class View:
    """Equal for all layers of a stack.

    real: bool [batch, length], False at padding, None where there is none. memory: [batch, source, dim], the encoder's output;
    None also where all layers have kept the source's keys and values. past: how many positions a cache holds already, or
    the entries of a cache of fixed size that the new positions take.
    """

    mask: Mask
    rotation: Rotation | None = None
    past: int | Tensor = 0
    memory: Tensor | None = None
    memory_mask: Mask | None = None
    real: Tensor | None = None


@dataclass(frozen=True)
class Placed:
    """New positions among all that attention may look at.

    places: int [1 or batch, new]; key_places: int [1 or batch, all]; mask: who may look where, before any bias.
    """

    places: Tensor
    key_places: Tensor
    mask: Mask


def place(positions: Positions, inputs: Sequences, cache: Cache | None, *, causal: bool) -> Placed:
    """Where the positions of a batch stand, behind those that `cache` holds, which is extended by them."""
    length, device = inputs.states.shape[1], inputs.states.device
    if cache is not None and inputs.segments is not None:
        raise InputError("packed documents cannot be decoded step by step", fix="give each document its own row")
    if cache is not None:
        cache.check_rows(inputs.states.shape[0])
    if cache is not None and cache.seen is not None:
        positions.check_length(len(cache.widths) + 1)
        places, seen = cache.extend_branches(length)
        return Placed(places, cache.places().to(device), Mask(values=seen[:, None]))
    past = cache.length if cache else 0
    if inputs.segments is None:  # before the cache is extended: a step that is refused leaves it as it was
        positions.check_length(past + length)
    real = cache.extend(length, inputs.real) if cache else inputs.real
    everywhere = position_ids(past + length, device=device, real=real, segments=inputs.segments)
    if inputs.segments is not None:
        positions.check_length(everywhere)
    mask = self_mask(length, causal=causal, device=device, real=real, segments=inputs.segments, past=past)
    return Placed(everywhere[:, past:], everywhere, mask)


def make_view(
    positions: Positions,
    placed: Placed,
    dtype: torch.dtype,
    *,
    past: int | Tensor = 0,
    memory: Tensor | None = None,
    memory_mask: Mask | None = None,
    real: Tensor | None = None,
) -> View:
    """The view of layers whose products are in `dtype`; masks become float biases."""
    mask = placed.mask
    if positions.bias is not None:
        mask = mask.with_bias(positions.bias(placed.places, placed.key_places))
    memory_mask = None if memory_mask is None else memory_mask.as_bias(dtype)
    return View(mask.as_bias(dtype), make_rotation(positions, placed, dtype), past, memory, memory_mask, real)


def make_rotation(positions: Positions, placed: Placed, dtype: torch.dtype) -> Rotation | None:
    """The rotary tables of the new positions; None where order is not rotated into queries and keys."""
    return None if positions.rotary is None else positions.rotary(placed.places, dtype)


def mask_of_memory(inputs: Sequences, memory: Sequences) -> Mask:
    """The view of a batch on its sources."""
    return cross_mask(real=memory.real, segments=inputs.segments, memory_segments=memory.segments)
