"""Read several token files as one, with sampling rates per direction and corpus.

An epoch has as many pairs as all corpora together, each weighted by its rate. Directions share it by p ~ n^(1/T), and the
corpora of one direction in proportion to size times rate. A corpus whose share is above its size is repeated; one below it
continues in the next epoch where it stopped. In the long run all pairs of a corpus are shown equally often.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kilolayer.data.filters import FilterReport
from kilolayer.data.store import INDEX_TYPE, TokenPairs
from kilolayer.errors import InputError

PAIRS_AT_ONCE = 1 << 20
MAPPED_BYTES = 128 << 20  # larger files are read pair by pair, because a few batches would map all of them into memory


@dataclass(frozen=True)
class Part:
    """One corpus of a mixture: its pairs, its direction, and how often an epoch shows each pair at temperature 1."""

    pairs: TokenPairs
    direction: str = ""
    upsample: float = 1.0


class Mixture:
    """Corpora under one numbering: pair j of part i has number starts[i] + j."""

    def __init__(self, parts: Sequence[Part], temperature: float = 1.0) -> None:
        sizes = [len(part.pairs) for part in parts]
        if not parts or not all(sizes):
            raise InputError("a corpus has no pairs", where="in a mixture", fix="remove empty corpora")
        if sum(sizes) >= 1 << 31:
            raise InputError(f"{sum(sizes):,} pairs are too many", where="in a mixture", fix="at most 2,147,483,647 pairs")
        self.parts = list(parts)
        self.starts = np.cumsum([0, *sizes[:-1]])
        self.quotas = _quotas(parts, temperature)
        if len(self) >= 1 << 31:
            raise InputError(
                f"an epoch of {len(self):,} pairs is too long",
                where="in a mixture",
                fix="lower upsample; at most 2,147,483,647 pairs",
            )
        self._large = sum(part.pairs.bytes for part in parts) > MAPPED_BYTES
        for part in parts if self._large else ():
            part.pairs.keep_open()

    def __len__(self) -> int:
        """Number of pairs in an epoch."""
        return sum(self.quotas)

    @property
    def report(self) -> FilterReport:
        """What the filters removed from all parts."""
        return sum((part.pairs.report for part in self.parts), FilterReport())

    def epoch(self, epoch: int, seed: int) -> Iterator[tuple[Part, int, np.ndarray]]:
        """All pairs that an epoch shows, in no particular order: (part, number of its first pair, int32 [n] indices within
        the part)."""
        for number, (part, quota) in enumerate(zip(self.parts, self.quotas, strict=True)):
            for pairs in _stream(len(part.pairs), epoch * quota, (epoch + 1) * quota, [seed, number]):
                yield part, int(self.starts[number]), pairs

    def rows(self, numbers: np.ndarray, source_width: int, target_width: int) -> tuple[np.ndarray, np.ndarray]:
        """Sources int64 [n, source_width] and targets int64 [n, target_width], padded with 0."""
        order = np.argsort(numbers)
        ordered = numbers[order]
        edges = [*np.searchsorted(ordered, self.starts).tolist(), len(ordered)]
        pieces = [(i, slice(edges[i], edges[i + 1])) for i in range(len(self.parts)) if edges[i] < edges[i + 1]]
        tokens, index = [], np.empty(len(numbers), INDEX_TYPE)
        for i, few in pieces:
            found, index[few] = self.parts[i].pairs.fetch(ordered[few] - self.starts[i], read=self._large)
            tokens.append((few, found))
        starts, lengths = index["start"].astype(np.int64), index["source"].astype(np.int64)
        sources = _rectangle(tokens, order, starts, lengths, source_width)
        return sources, _rectangle(tokens, order, starts + lengths, index["target"].astype(np.int64), target_width)

    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """The distinct (source, target) lengths, int64 [n, 2], and how often each occurs in an epoch, float [n]."""
        weights: dict[int, float] = {}
        for part, quota in zip(self.parts, self.quotas, strict=True):
            for start in range(0, len(part.pairs), PAIRS_AT_ONCE):
                few = slice(start, start + PAIRS_AT_ONCE)
                both = part.pairs.source_lengths[few].astype(np.int64) << 32 | part.pairs.target_lengths[few]
                for code, count in zip(*(each.tolist() for each in np.unique(both, return_counts=True)), strict=True):
                    weights[code] = weights.get(code, 0.0) + count * quota / len(part.pairs)
                part.pairs.release()
        codes = np.array(sorted(weights), np.int64)
        return np.stack([codes >> 32, codes & 0xFFFFFFFF], axis=1), np.array([weights[code] for code in codes.tolist()])


def _quotas(parts: Sequence[Part], temperature: float) -> list[int]:
    """Number of pairs of each part in an epoch, at least one."""
    shown = [len(part.pairs) * part.upsample for part in parts]
    directions: dict[str, float] = {}
    for part, count in zip(parts, shown, strict=True):
        directions[part.direction] = directions.get(part.direction, 0.0) + count
    flattened = {direction: count ** (1 / temperature) for direction, count in directions.items()}
    scale = sum(shown) / sum(flattened.values())
    shares = {direction: scale * flattened[direction] / count for direction, count in directions.items()}
    return [max(round(count * shares[part.direction]), 1) for part, count in zip(parts, shown, strict=True)]


def _stream(size: int, start: int, stop: int, seed: list[int]) -> Iterator[np.ndarray]:
    """Positions start to stop of an endless sequence of permutations of `size` pairs, int32, in chunks.

    A permutation that is shown whole is returned in order, because all pairs are shuffled later.
    """
    for turn in range(start // size, -(-stop // size)):
        low, high = max(start - turn * size, 0), min(stop - turn * size, size)
        some = None
        if high - low < size:
            some = np.arange(size, dtype=np.int32)
            np.random.default_rng([*seed, turn]).shuffle(some)
        for first in range(low, high, PAIRS_AT_ONCE):
            end = min(first + PAIRS_AT_ONCE, high)
            yield np.arange(first, end, dtype=np.int32) if some is None else some[first:end]


def _rectangle(
    tokens: list[tuple[slice, np.ndarray]], order: np.ndarray, starts: np.ndarray, lengths: np.ndarray, width: int
) -> np.ndarray:
    """int64 [n, width], padded with 0: row order[i] holds `lengths[i]` tokens from `starts[i]` of the array for row i."""
    real = np.arange(width) < lengths[:, None]
    indices = np.where(real, starts[:, None] + np.arange(width), 0)
    rows = np.empty(real.shape, np.int64)
    for few, source in tokens:
        rows[few] = source[indices[few]]
    rows[~real] = 0
    unsorted = np.empty_like(rows)
    unsorted[order] = rows
    return unsorted
