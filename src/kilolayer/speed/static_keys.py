"""A key-value cache of fixed size and address, for decoding steps that are recorded as CUDA graphs."""

from __future__ import annotations

from torch import Tensor


class StaticKeys:
    """One layer's keys and values, [rows, key_heads, entries, head_dim] each, and those of a source, if any."""

    def __init__(self, entries: Tensor, memory: Tensor | None) -> None:
        self.keys, self.values = entries
        self.memory: tuple[Tensor, Tensor] | None = None if memory is None else (memory[0], memory[1])

    def append(self, key: Tensor, value: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """Write to the entries with the indices past, int64 [new]; return all entries, including those not yet written."""
        self.keys.index_copy_(2, past, key)
        self.values.index_copy_(2, past, value)
        return self.keys, self.values
