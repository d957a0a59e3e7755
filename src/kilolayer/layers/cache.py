"""Keys and values kept from step to step of decoding."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from kilolayer.errors import InputError, OptionError, shown


class KeyCache(Protocol):
    """What attention asks of one layer's cache. `memory`: cross-attention's keys and values, once they are computed."""

    memory: tuple[Tensor, Tensor] | None

    def append(self, key: Tensor, value: Tensor, past: Any) -> tuple[Tensor, Tensor]:
        """Write [batch, key heads, new, head width] behind what is `past`; return all that may be looked at."""
        ...


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

    def keep(self, rows: Tensor, past: int) -> None:
        """Let only these rows go on, in this order, each with its `past` written positions."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = _moved(self.keys, rows, past), _moved(self.values, rows, past)
        if self.memory is not None:
            key, value = self.memory
            self.memory = (_moved(key, rows, key.shape[2]), _moved(value, rows, value.shape[2]))


class Cache:
    """What a decoder has read so far; `length` entries of at most `capacity`.

    A row is read in a line, or, after `branch`, as several hypotheses side by side: each step reads one token of each, all at
    one position. Their entries lie in the one row, and a hypothesis sees those that are its own past. So a change of parents
    moves no key and no value, and the hypotheses share the row of the source.
    """

    def __init__(self, layers: int, capacity: int) -> None:
        if not isinstance(capacity, int) or capacity < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OptionError(f"capacity is {shown(capacity)}", fix="give a whole number of positions, at least 1")
        self.capacity = capacity
        self.length = 0
        self.rows: int | None = None  # of what was read
        self.real: Tensor | None = None  # bool [batch, length], False at padding
        self.seen: Tensor | None = None  # bool [batch, branches, length]; None while there are no branches
        self.widths: list[int] = []  # entries at each position
        self.layers = [LayerCache(capacity) for _ in range(layers)]

    def check_rows(self, rows: int) -> None:
        """Refuse a step of another batch, which could be broadcast to the rows of this one."""
        if self.length and self.rows not in (None, rows):
            raise InputError(
                f"{rows} rows of new tokens, but the cache has {self.rows}",
                fix="give the next tokens of each row, or start with a new cache: model.new_cache(capacity=...)",
            )
        self.rows = rows

    def extend(self, length: int, real: Tensor | None) -> Tensor | None:
        """Check that `length` more positions fit; return bool [batch, all positions], None where nothing is padding."""
        self._check_room(length)
        self.widths += [1] * length
        if real is not None or self.real is not None:
            before, after = self.real, real
            if before is None:
                assert after is not None
                before = after.new_ones(len(after), self.length)
            if after is None:
                after = before.new_ones(len(before), length)
            self.real = torch.cat([before, after], dim=1)
        return self.real

    def advance(self, length: int) -> None:
        """After all layers have read `length` more entries."""
        if not self.length:
            empty = [str(index) for index, layer in enumerate(self.layers, 1) if layer.keys is None]
            if empty:
                raise InputError(
                    f"the attention of layer {', '.join(empty)} has kept no keys and values of what it read",
                    fix="an attention of your own that decodes step by step calls cache.append(key, value, past)",
                )
        self.length += length

    def branch(self, parents: Tensor) -> None:
        """From here on, the k-th token of a step continues the branch parents[:, k] of the step before.

        parents: int [batch, branches]; all 0 at the first branching, where there is but one past.
        """
        batch = len(parents)
        past = self.seen
        if past is None:
            line = self.real if self.real is not None else parents.new_ones(batch, self.length, dtype=torch.bool)
            past = line[:, None]
        self.seen = past.gather(1, parents[..., None].expand(-1, -1, self.length))

    def extend_branches(self, branches: int) -> tuple[Tensor, Tensor]:
        """One token more for each branch: its position, int [1 or batch, branches], and all that it sees.

        The second is bool [batch, branches, all entries].
        """
        assert self.seen is not None
        self._check_room(branches)
        self.widths.append(branches)
        itself = torch.eye(branches, dtype=torch.bool, device=self.seen.device).expand(len(self.seen), -1, -1)
        self.seen = torch.cat([self.seen, itself], dim=2)
        if self.real is None:
            return torch.full((1, branches), len(self.widths) - 1, device=self.seen.device), self.seen
        line = self.real.shape[1]
        places = self.real.sum(dim=1, keepdim=True) + (len(self.widths) - 1 - line)
        return places.expand(-1, branches), self.seen

    def places(self) -> Tensor:
        """The position of each entry, padding not counted: int [1 or batch, length]."""
        index = torch.repeat_interleave(torch.tensor(self.widths))
        if self.real is None:
            return index[None]
        line = self.real.shape[1]
        counted = self.real.cumsum(dim=1)
        after = counted[:, -1:] + (index[line:] - line).to(counted.device)
        return torch.cat([(counted - 1).clamp(min=0), after], dim=1)

    def keep(self, rows: Tensor) -> None:
        """Let only these rows go on, in this order: int [rows]. A row that stays in its place is not copied."""
        for layer in self.layers:
            layer.keep(rows, self.length)
        self.rows = len(rows)
        self.real = None if self.real is None else self.real[rows]
        self.seen = None if self.seen is None else self.seen[rows]

    def _check_room(self, length: int) -> None:
        if self.length + length > self.capacity:
            raise InputError(
                f"the cache holds {self.capacity} positions, but {self.length} + {length} are needed",
                fix="create a larger one: model.new_cache(capacity=...)",
            )


def _moved(entries: Tensor, rows: Tensor, past: int) -> Tensor:
    """The first `past` entries of these rows, written over those that leave; [batch, heads, entries, head width]."""
    changed = rows != torch.arange(len(rows), device=rows.device)
    entries[changed.nonzero()[:, 0], :, :past] = entries[rows[changed], :, :past]
    return entries[: len(rows)]
