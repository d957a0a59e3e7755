"""The key-value cache of step-by-step decoding."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from kilolayer.errors import InputError, OptionError, shown


class KeyCache(Protocol):
    """What attention needs from the cache of one layer.

    memory: the keys and values of cross-attention, [batch, key_heads, source, head_dim] each; None until they are computed.
    """

    memory: tuple[Tensor, Tensor] | None

    def append(self, key: Tensor, value: Tensor, past: Any) -> tuple[Tensor, Tensor]:
        """Write new keys and values [batch, key_heads, new, head_dim] after the `past` ones; return all that can be read."""
        ...


class LayerCache:
    """One layer's keys and values, [batch, key_heads, capacity, head_dim] each, allocated at the first step."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.memory: tuple[Tensor, Tensor] | None = None  # of cross-attention, computed once

    def append(self, key: Tensor, value: Tensor, past: int) -> tuple[Tensor, Tensor]:
        """Write new keys and values [batch, key_heads, new, head_dim] after `past` positions; return all written so far."""
        if self.keys is None or self.values is None:
            shape = (*key.shape[:2], self.capacity, key.shape[3])
            self.keys, self.values = key.new_empty(shape), value.new_empty(shape)
        end = past + key.shape[2]
        self.keys[:, :, past:end] = key
        self.values[:, :, past:end] = value
        return self.keys[:, :, :end], self.values[:, :, :end]

    def keep(self, rows: Tensor, past: int) -> None:
        """Keep only these rows of the batch, in this order, each with its `past` written positions."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = _moved(self.keys, rows, past), _moved(self.values, rows, past)
        if self.memory is not None:
            key, value = self.memory
            self.memory = (_moved(key, rows, key.shape[2]), _moved(value, rows, value.shape[2]))


class Cache:
    """The keys and values of everything that a decoder has read so far: `length` entries out of at most `capacity`.

    Each row of the batch holds one sequence or, after `branch`, the hypotheses of a beam search. Then each step adds one entry
    per hypothesis, all at the same position, to that row, and the mask `seen` limits each hypothesis to the entries of its own
    past. So no key or value moves when hypotheses are reordered, and all hypotheses share one copy of the source.
    """

    def __init__(self, layers: int, capacity: int) -> None:
        if not isinstance(capacity, int) or capacity < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OptionError(f"capacity is {shown(capacity)}", fix="give a whole number of positions, at least 1")
        self.capacity = capacity
        self.length = 0
        self.rows: int | None = None  # batch size of the tokens read so far
        self.real: Tensor | None = None  # bool [batch, length], False at padding
        self.seen: Tensor | None = None  # bool [batch, branches, length]; None while there are no branches
        self.widths: list[int] = []  # number of entries at each position
        self.layers = [LayerCache(capacity) for _ in range(layers)]

    def check_rows(self, rows: int) -> None:
        """Raise if the batch size differs from earlier steps; otherwise broadcasting could hide the mistake."""
        if self.length and self.rows not in (None, rows):
            raise InputError(
                f"{rows} rows of new tokens, but the cache has {self.rows}",
                fix="give the next tokens of each row, or start with a new cache: model.new_cache(capacity=...)",
            )
        self.rows = rows

    def extend(self, length: int, real: Tensor | None) -> Tensor | None:
        """Make room for `length` more positions; return the mask bool [batch, all positions], None if nothing is padding."""
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
        """Count `length` more entries; called after all layers have written them."""
        if not self.length:
            empty = [str(index) for index, layer in enumerate(self.layers, 1) if layer.keys is None]
            if empty:
                raise InputError(
                    f"the attention of layer {', '.join(empty)} has kept no keys and values of what it read",
                    fix="an attention of your own that decodes step by step calls cache.append(key, value, past)",
                )
        self.length += length

    def branch(self, parents: Tensor) -> None:
        """Let the k-th token of the next step continue the branch parents[:, k] of the step before.

        parents: int [batch, branches]; all 0 at the first branching, when each row has only one past.
        """
        batch = len(parents)
        past = self.seen
        if past is None:
            line = self.real if self.real is not None else parents.new_ones(batch, self.length, dtype=torch.bool)
            past = line[:, None]
        self.seen = past.gather(1, parents[..., None].expand(-1, -1, self.length))

    def extend_branches(self, branches: int) -> tuple[Tensor, Tensor]:
        """Add one entry per branch; return the positions of the new tokens and the mask of what each of them sees.

        Positions: int [1 or batch, branches]; mask: bool [batch, branches, all entries].
        """
        assert self.seen is not None
        self._check_room(branches)
        self.widths.append(branches)
        itself = torch.eye(branches, dtype=torch.bool, device=self.seen.device).expand(len(self.seen), -1, -1)
        self.seen = torch.cat([self.seen, itself], dim=2)
        if self.real is None:
            return torch.full((1, branches), len(self.widths) - 1, device=self.seen.device), self.seen
        line = self.real.shape[1]
        ids = self.real.sum(dim=1, keepdim=True) + (len(self.widths) - 1 - line)
        return ids.expand(-1, branches), self.seen

    def position_ids(self) -> Tensor:
        """The position of each entry, padding not counted: int [1 or batch, length]."""
        index = torch.repeat_interleave(torch.tensor(self.widths))
        if self.real is None:
            return index[None]
        line = self.real.shape[1]
        counted = self.real.cumsum(dim=1)
        after = counted[:, -1:] + (index[line:] - line).to(counted.device)
        return torch.cat([(counted - 1).clamp(min=0), after], dim=1)

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows of the batch, int [rows], in this order. Rows whose index does not change are not copied."""
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
    """Move the first `past` entries of these rows to the front, in place; entries [batch, heads, entries, head_dim]."""
    changed = rows != torch.arange(len(rows), device=rows.device)
    entries[changed.nonzero()[:, 0], :, :past] = entries[rows[changed], :, :past]
    return entries[: len(rows)]
