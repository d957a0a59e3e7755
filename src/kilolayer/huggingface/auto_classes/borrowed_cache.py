"""Adapts Transformers' key-value cache to the interface of Kilolayer's attention.

Transformers owns the cache between steps: it reorders it for beam search, crops it and moves it between devices. This module
lends it to a stack for one forward pass.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from transformers import Cache as TheirCache
from transformers import DynamicCache, EncoderDecoderCache

from kilolayer.errors import InputError
from kilolayer.huggingface.auto_classes.padding import real_positions
from kilolayer.layers.cache import Cache

Kept = TheirCache | EncoderDecoderCache


class BorrowedLayer:
    """One layer of Transformers' cache, as a `KeyCache`."""

    def __init__(self, kept: Kept, layer: int) -> None:
        self.kept, self.layer = kept, layer
        self.own = kept.self_attention_cache if isinstance(kept, EncoderDecoderCache) else kept

    def append(self, key: Tensor, value: Tensor, past: Any) -> tuple[Tensor, Tensor]:
        """Append [batch, key heads, new, head width] to what is cached, and return all of it."""
        return self.own.update(key, value, self.layer)

    @property
    def memory(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values of the source, [batch, key heads, source, head width] each, once they are computed."""
        assert isinstance(self.kept, EncoderDecoderCache)
        if not self.kept.is_updated.get(self.layer):
            return None
        there: Any = self.kept.cross_attention_cache.layers[self.layer]
        return there.keys, there.values

    @memory.setter
    def memory(self, computed: tuple[Tensor, Tensor]) -> None:
        assert isinstance(self.kept, EncoderDecoderCache)
        self.kept.cross_attention_cache.update(*computed, self.layer)
        self.kept.is_updated[self.layer] = True


class BorrowedCache(Cache):
    """The cache of a decoder with `layers` layers. real: bool [batch, length so far], None if nothing is padding."""

    layers: list[Any]

    def __init__(self, kept: Kept, layers: int, real: Tensor | None) -> None:
        super().__init__(0, sys.maxsize)
        if getattr(kept, "is_compileable", False):
            raise InputError(
                f"a {type(kept).__name__} has a fixed size, and these models need a cache that grows",
                fix="remove cache_implementation, or give a DynamicCache",
            )
        self.layers = [BorrowedLayer(kept, layer) for layer in range(layers)]
        self.length = int(kept.get_seq_length())
        self.real = real

    def advance(self, length: int) -> None:
        """Do nothing: Transformers keeps the count."""


def new_cache(*, crossed: bool) -> Kept:
    """An empty cache that grows. crossed: also with keys and values of a source, for cross-attention."""
    return EncoderDecoderCache(DynamicCache(), DynamicCache()) if crossed else DynamicCache()


def borrow_cache(
    kept: Kept | None, layers: int, attention_mask: Tensor | None, length: int
) -> tuple[BorrowedCache | None, Tensor | None]:
    """A cache for one forward pass over `length` new positions, and which of these are not padding: bool [batch, length], or
    None."""
    past = 0 if kept is None else int(kept.get_seq_length())
    before, real = real_positions(attention_mask, past, length)
    return None if kept is None else BorrowedCache(kept, layers, before), real
