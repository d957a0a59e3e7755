"""Keys and values in memory of fixed size and place, for decoding steps that are recorded."""

from __future__ import annotations

from torch import Tensor


class StaticKeys:
    """One layer's keys and values: [rows, key heads, entries, head width] each; and a source's, if any. Nothing here moves."""

    def __init__(self, entries: Tensor, memory: Tensor | None) -> None:
        self.keys, self.values = entries
        self.memory: tuple[Tensor, Tensor] | None = None if memory is None else (memory[0], memory[1])

    def append(self, key: Tensor, value: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """Write into the entries int64 [new] of `past`; return all entries, also those that hold nothing yet."""
        self.keys.index_copy_(2, past, key)
        self.values.index_copy_(2, past, value)
        return self.keys, self.values
