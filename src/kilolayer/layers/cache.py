"""Keys and values kept from step to step of decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from kilolayer.errors import InputError


class LayerCache:
    """One layer's keys and values [batch, key heads, capacity, head width], allocated at the first step."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.memory: tuple[Tensor, Tensor] | None = None  # cross-attention's, computed once

    def append(self, key: Tensor, value: Tensor, past: int) -> tuple[Tensor, Tensor]:
        """Write [batch, key heads, new, head width] behind `past` positions; return all written so far."""
        if self.keys is None or self.values is None:
            shape = (*key.shape[:2], self.capacity, key.shape[3])
            self.keys, self.values = key.new_empty(shape), value.new_empty(shape)
        end = past + key.shape[2]
        self.keys[:, :, past:end] = key
        self.values[:, :, past:end] = value
        return self.keys[:, :, :end], self.values[:, :, :end]


class Cache:
    """What a decoder has read so far; `length` positions of at most `capacity`."""

    def __init__(self, layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.real: Tensor | None = None  # bool [batch, length], False at padding
        self.layers = [LayerCache(capacity) for _ in range(layers)]

    def extend(self, length: int, real: Tensor | None) -> Tensor | None:
        """Check that `length` more positions fit; return bool [batch, all positions], None where nothing is padding."""
        if self.length + length > self.capacity:
            raise InputError(
                f"the cache holds {self.capacity} positions, and {self.length} + {length} are needed",
                fix="make it larger: model.new_cache(capacity=...)",
            )
        if real is not None or self.real is not None:
            before, after = self.real, real
            if before is None:
                assert after is not None
                before = after.new_ones(len(after), self.length)
            if after is None:
                after = before.new_ones(len(before), length)
            self.real = torch.cat([before, after], dim=1)
        return self.real
