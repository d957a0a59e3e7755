"""The order of large corpora, without an index of all their pairs: an epoch in sections, each read when it is reached.

The pairs of a corpus are shuffled in blocks of consecutive pairs: its sequence is an endless succession of permutations of its
blocks. A section of an epoch continues the sequence of every corpus by the same fraction of an epoch, and `Batches` shuffles
the pairs of a section. A table with the number of pairs of each shape in each block gives the number of batches in all sections
without their lengths. It is made once and cached, so a position far into an epoch is found within seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kilolayer.data.cache_folder import built, content_key
from kilolayer.data.mixing import PAIRS_AT_ONCE, Mixture
from kilolayer.data.shapes import Assignment

BLOCK = 1 << 12
"""Pairs in a block, which are read from disk together. A divisor of PAIRS_AT_ONCE, and small enough for counts in uint16."""
SECTION = 1 << 22
"""Maximum number of pairs in a section: about a thousand blocks, and 50 MB of memory."""
LENGTHS, COUNTS = "lengths.npz", "counts.{}.npy"


class Pieces(NamedTuple):
    """Runs of consecutive pairs of one corpus, each within one block; all arrays are int64 [pieces]."""

    blocks: np.ndarray
    begin: np.ndarray
    """The first pair."""
    end: np.ndarray
    """One behind the last pair."""
    is_whole: np.ndarray
    """bool [pieces]: whether a run is all of its block."""


class Sections:
    """The sections of all epochs of a mixture.

    kinds: the number of shapes that `assign` knows. cache: where the table of blocks is kept; None: it is made again each time.
    """

    def __init__(self, mixture: Mixture, assign: Assignment, kinds: int, seed: int, cache: Path | None) -> None:
        self.mixture, self.seed, self.kinds = mixture, seed, kinds
        self.count = -(-len(mixture) // SECTION)
        self._assign = assign
        self._counts = self._count_blocks(cache)
        self._turns: dict[int, tuple[int, np.ndarray, np.ndarray]] = {}

    @property
    def identity(self) -> list[object]:
        """What the order depends on, besides the data, its shapes and the seed."""
        return ["sections", BLOCK, SECTION]

    def chunks(self, epoch: int, section: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The pairs of a section: their numbers in the mixture, int32 [n], and their shapes, uint8 [n]."""
        for number in range(len(self.mixture.parts)):
            base = int(self.mixture.starts[number])
            for pieces in self._pieces(number, epoch, section):
                for begin, end in zip(pieces.begin.tolist(), pieces.end.tolist(), strict=True):
                    yield np.arange(base + begin, base + end, dtype=np.int32), self._shapes(number, begin, end)

    def counts(self, epoch: int) -> np.ndarray:
        """int64 [sections, kinds]: the number of pairs of each shape in each section of an epoch."""
        counts = np.zeros((self.count, self.kinds), np.int64)
        for number in range(len(self.mixture.parts)):
            for section in range(self.count):
                for pieces in self._pieces(number, epoch, section):
                    counts[section] += self._counts[number][pieces.blocks[pieces.is_whole]].sum(0, dtype=np.int64)
                    for i in np.flatnonzero(~pieces.is_whole):
                        shapes = self._shapes(number, int(pieces.begin[i]), int(pieces.end[i]))
                        counts[section] += np.bincount(shapes, minlength=self.kinds)
        return counts

    def _pieces(self, number: int, epoch: int, section: int) -> Iterator[Pieces]:
        """What a section shows of one corpus, in the order of the corpus's sequence."""
        size, quota = len(self.mixture.parts[number].pairs), self.mixture.quotas[number]
        start, stop = (epoch * quota + quota * edge // self.count for edge in (section, section + 1))
        for turn in range(start // size, -(-stop // size)):
            low, high = max(start - turn * size, 0), min(stop - turn * size, size)
            if low == high:
                continue
            order, ends = self._turn(number, turn)
            first, last = np.searchsorted(ends, [low, high - 1], side="right").tolist()
            blocks = order[first : last + 1]
            begin = blocks * BLOCK
            end = np.minimum(begin + BLOCK, size)
            sizes = end - begin
            begin[0] += low - (ends[first] - sizes[0])
            end[-1] -= ends[last] - high
            yield Pieces(blocks, begin, end, end - begin == sizes)

    def _turn(self, number: int, turn: int) -> tuple[np.ndarray, np.ndarray]:
        """A permutation of a corpus's blocks, int64 [blocks], and where each block ends in its sequence."""
        if number not in self._turns or self._turns[number][0] != turn:
            size = len(self.mixture.parts[number].pairs)
            order = np.random.default_rng([self.seed, number, turn]).permutation(-(-size // BLOCK))
            sizes = np.minimum(size - order * BLOCK, BLOCK)
            self._turns[number] = turn, order, np.cumsum(sizes)
        return self._turns[number][1:]

    def _shapes(self, number: int, begin: int, end: int) -> np.ndarray:
        index = self.mixture.parts[number].pairs.read_index(begin, end)
        return self._assign(index["source"], index["target"])

    def _count_blocks(self, cache: Path | None) -> list[np.ndarray]:
        """uint16 [blocks, kinds] for each corpus: how many pairs of each shape a block has."""
        tables = range(len(self.mixture.parts))
        if cache is None:
            return [self._count_part(number) for number in tables]

        def build(draft: Path) -> None:
            for number in tables:
                np.save(draft / COUNTS.format(number), self._count_part(number))

        digests = [part.pairs.digest for part in self.mixture.parts]
        key = content_key(["blocks 1", BLOCK, self._assign.identity, digests])
        folder = built(cache / f"blocks-{key}", build, trust_times=True)
        return [np.load(folder / COUNTS.format(number), mmap_mode="r") for number in tables]

    def _count_part(self, number: int) -> np.ndarray:
        pairs = self.mixture.parts[number].pairs
        table = np.empty((-(-len(pairs) // BLOCK), self.kinds), np.uint16)
        for start in range(0, len(pairs), PAIRS_AT_ONCE):
            shapes = self._shapes(number, start, start + PAIRS_AT_ONCE)
            cells = np.arange(len(shapes)) // BLOCK * self.kinds + shapes
            blocks = -(-len(shapes) // BLOCK)
            found = np.bincount(cells, minlength=blocks * self.kinds).reshape(blocks, self.kinds)
            table[start // BLOCK :][:blocks] = found
        return table


def cached_lengths(mixture: Mixture, cache: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """`mixture.lengths()`, which reads the lengths of all pairs, only once."""
    if cache is None:
        return mixture.lengths()

    def build(draft: Path) -> None:
        lengths, counts = mixture.lengths()
        np.savez(draft / LENGTHS, lengths=lengths, counts=counts)

    key = content_key(["lengths 1", mixture.quotas, [part.pairs.digest for part in mixture.parts]])
    with np.load(built(cache / f"lengths-{key}", build) / LENGTHS) as found:
        return found["lengths"], found["counts"]
