"""Keys and values that Transformers keeps, as Kilolayer's attention asks for them.

Transformers owns the cache from step to step: it reorders it for a beam search, crops it and moves it between devices. For one
forward, this lends it to a stack.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from transformers import Cache as TheirCache
from transformers import DynamicCache, EncoderDecoderCache

from kilolayer.auto_classes.padding import real_positions
from kilolayer.errors import InputError
from kilolayer.layers.cache import Cache

Kept = TheirCache | EncoderDecoderCache


class BorrowedLayer:
    """One layer of their cache, as a `KeyCache`."""

    def __init__(self, kept: Kept, layer: int) -> None:
        self.kept, self.layer = kept, layer
        self.own = kept.self_attention_cache if isinstance(kept, EncoderDecoderCache) else kept

    def append(self, key: Tensor, value: Tensor, past: Any) -> tuple[Tensor, Tensor]:
        """Write [batch, key heads, new, head width] behind what is kept; return all of it."""
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
    """What a decoder of so many layers has read so far; `real`: bool [batch, read so far], None where nothing is padding."""

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
        """Nothing: Transformers counts what it keeps."""


def new_cache(*, crossed: bool) -> Kept:
    """An empty one, that grows; crossed: with keys and values of a source."""
    return EncoderDecoderCache(DynamicCache(), DynamicCache()) if crossed else DynamicCache()


def lend(
    kept: Kept | None, layers: int, attention_mask: Tensor | None, length: int
) -> tuple[BorrowedCache | None, Tensor | None]:
    """A cache for one forward over `length` new positions, and what of these is no padding: bool [batch, length], or None."""
    past = 0 if kept is None else int(kept.get_seq_length())
    before, real = real_positions(attention_mask, past, length)
    return None if kept is None else BorrowedCache(kept, layers, before), real
