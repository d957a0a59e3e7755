"""Pack whole documents into rows of one length; short documents share a row without attending to each other.

A piece is: start, at most length - 2 tokens of one document, end. The rest of a row is padding. A document longer than a row is
cut, in each epoch at different offsets, so that it is not always the same tokens that are next to a cut; all others stay whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kilolayer.data.endless import EndlessBatches
from kilolayer.data.token_text import TokenText
from kilolayer.data.tokenizer import END, PAD, START

CHUNK = 1 << 20  # tokens
EDGES = 2  # the start and end tokens of a piece
FILLING = -1


@dataclass(frozen=True)
class PackedBatch:
    """Rows of one length. The last batch of an epoch is filled up with rows of padding."""

    tokens: Tensor
    """int64 [rows, length]."""
    real: Tensor | None
    """bool [rows, length], False at padding; None if there is no padding."""
    segments: Tensor | None
    """int64 [rows, length]: the piece of each position, from 1, and 0 at padding; None if no row has more than one piece."""


class Documents:
    """Where the documents of a text start, and their lengths; empty documents are left out."""

    def __init__(self, text: TokenText) -> None:
        self.text = text
        ends = [first + np.flatnonzero(text.read(np.array([first]), width)[0] == END) for first, width in _chunks(len(text))]
        # If the part was cut out of a document, no end token follows it.
        edges = np.concatenate([*ends, [len(text)]])
        lengths = np.diff(edges) - 1
        self.starts, self.lengths = edges[:-1][lengths > 0] + 1, lengths[lengths > 0]


@dataclass(frozen=True)
class Plan:
    """Which pieces are in which row."""

    starts: np.ndarray
    """int64 [pieces]: where each piece begins in the text, ordered by row."""
    lengths: np.ndarray
    """int64 [pieces]: their lengths in tokens, without start and end."""
    first: np.ndarray
    """int64 [rows + 1]: the index of each row's first piece, then the number of pieces."""

    @classmethod
    def draw(cls, documents: Documents, length: int, rng: np.random.Generator) -> Plan:
        """Draw the rows of one epoch."""
        starts, lengths = cut(documents.starts, documents.lengths, length - EDGES, rng)
        row_of, rows = best_fit(lengths + EDGES, length, rng)
        order = np.argsort(row_of, kind="stable")
        first = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=rows))])
        return cls(starts[order], lengths[order], first)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.first) - 1

    def full(self, length: int) -> np.ndarray:
        """bool [rows]: which rows are filled by a single piece."""
        return (np.diff(self.first) == 1) & (self.lengths[self.first[:-1]] + EDGES == length)

    def read(self, text: TokenText, rows: np.ndarray, length: int) -> PackedBatch:
        """Read the rows with the given indices, int64 [n]; FILLING stands for a row of padding."""
        counts = np.where(rows == FILLING, 0, self.first[rows + 1] - self.first[rows])
        pieces = ranges(self.first[rows], counts)
        row_of, first_of_row = np.repeat(np.arange(len(rows)), counts), np.repeat(np.cumsum(counts) - counts, counts)
        sizes = self.lengths[pieces] + EDGES
        before = np.cumsum(sizes) - sizes
        begin = row_of * length + before - before[first_of_row]
        tokens, segments = np.full(len(rows) * length, PAD, np.int64), np.zeros(len(rows) * length, np.int64)
        tokens[begin], tokens[begin + sizes - 1] = START, END
        tokens[ranges(begin + 1, sizes - EDGES)] = text.read_spans(self.starts[pieces], sizes - EDGES)
        segments[ranges(begin, sizes)] = np.repeat(np.arange(len(pieces)) - first_of_row + 1, sizes)
        tokens, segments = (torch.from_numpy(each.reshape(len(rows), length)) for each in (tokens, segments))
        padded, shared = sizes.sum() < len(rows) * length, counts.max() > 1
        return PackedBatch(tokens, tokens != PAD if padded or shared else None, segments if shared else None)


def cut(starts: np.ndarray, lengths: np.ndarray, room: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Cut documents into pieces of at most `room` tokens; the first piece of a long document has a random length."""
    first = np.where(lengths > room, rng.integers(1, room + 1, len(lengths)), lengths)
    counts = 1 + -(-(lengths - first) // room)
    document = np.repeat(np.arange(len(lengths)), counts)
    stop = np.minimum(first[document] + room * ranges(np.zeros_like(counts), counts), lengths[document])
    start = np.concatenate([[0], stop[:-1]])
    start[np.cumsum(counts) - counts] = 0
    return starts[document] + start, stop - start


def best_fit(sizes: np.ndarray, capacity: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Best-fit decreasing bin packing: the row of each piece, int64 [pieces], and the number of rows.

    Pieces are packed from the largest to the smallest, each into the open row with the least sufficient room, or else into a
    new row. All pieces of one size are packed together, so the time does not depend on their number; which of them goes where
    is random.
    """
    shuffled = rng.permutation(len(sizes))
    order = shuffled[np.argsort(-sizes[shuffled], kind="stable")]
    row_of = np.empty(len(sizes), np.int64)
    counts = np.bincount(sizes, minlength=capacity + 1)
    open_rows = _OpenRows(capacity)
    start = 0
    for size in range(capacity, 0, -1):
        left = int(counts[size])
        while left:
            room = open_rows.least_room(size)
            # After taking a piece, a row has the least room of all as long as another piece fits.
            each = room // size
            rows = open_rows.take(room, -(-left // each))
            taken = min(left, len(rows) * each)
            row_of[order[start : start + taken]] = np.repeat(rows, each)[:taken]
            open_rows.put(rows[:-1], room - each * size)
            open_rows.put(rows[-1:], room - (taken - (len(rows) - 1) * each) * size)
            start, left = start + taken, left - taken
    return row_of, open_rows.total


class _OpenRows:
    """Rows by remaining room; those with the whole capacity are new."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.total = capacity, 0
        self._rows: list[list[np.ndarray]] = [[] for _ in range(capacity + 1)]
        self._rooms = 0  # bit r is set if some row has room r

    def least_room(self, size: int) -> int:
        """The least room that holds `size`."""
        enough = self._rooms >> size
        return size + (enough & -enough).bit_length() - 1 if enough else self.capacity

    def take(self, room: int, most: int) -> np.ndarray:
        """Remove and return at most `most` rows with this room."""
        if room == self.capacity:
            self.total += most
            return np.arange(self.total - most, self.total)
        rows = np.concatenate(self._rows[room])
        self._rows[room] = []
        self._rooms &= ~(1 << room)
        self.put(rows[most:], room)
        return rows[:most]

    def put(self, rows: np.ndarray, room: int) -> None:
        """Add rows with this room left."""
        if len(rows) and room:
            self._rows[room].append(rows)
            self._rooms |= 1 << room


class PackedText(EndlessBatches[PackedBatch]):
    """An endless iterator over batches of `rows` packed rows of `length` tokens. Each epoch contains every token of the text
    once.

    Rows filled by a single piece are batched separately, so that a text of long documents has many batches without padding and
    segments, for which attention is fastest. Everything depends only on (seed, epoch), so a position is three numbers.
    """

    def __init__(self, documents: Documents, rows: int, length: int, seed: int = 0) -> None:
        super().__init__(seed, documents.text.digest, rows, length)
        self.documents, self.rows, self.length = documents, rows, length
        self._planned: tuple[int, Plan, np.ndarray] | None = None

    def read(self, index: int) -> PackedBatch:
        """The batch with this index in the current epoch."""
        plan, batches = self._plan()
        return plan.read(self.documents.text, batches[index], self.length)

    def __len__(self) -> int:
        """Number of batches in the current epoch."""
        return len(self._plan()[1])

    @property
    def summary(self) -> str:
        """One line for the log: what the text is, and how it is packed."""
        plan, batches = self._plan()
        padding = 1 - (plan.lengths + EDGES).sum() / (batches.size * self.length)
        pieces = len(plan.lengths) / plan.rows
        return (
            f"{self.documents.text}; batches of {self.rows} x {self.length}, {pieces:.1f} pieces per row, {padding:.1%} padding"
        )

    def _plan(self) -> tuple[Plan, np.ndarray]:
        """The rows of this epoch, and the row indices of each batch, int64 [batches, rows]."""
        if self._planned is None or self._planned[0] != self.epoch:
            rng = np.random.default_rng([self.seed, self.epoch])
            plan = Plan.draw(self.documents, self.length, rng)
            self._planned = self.epoch, plan, self._batches(plan, rng)
        return self._planned[1:]

    def _batches(self, plan: Plan, rng: np.random.Generator) -> np.ndarray:
        full = plan.full(self.length)
        alone, others = (rng.permutation(np.flatnonzero(each)) for each in (full, ~full))
        alone, left = np.split(alone, [len(alone) // self.rows * self.rows])
        mixed = rng.permutation(np.concatenate([left, others]))
        mixed = np.concatenate([mixed, np.full(-len(mixed) % self.rows, FILLING)])
        return rng.permutation(np.concatenate([alone, mixed]).reshape(-1, self.rows))


class FixedRows:
    """Rows of held-out text, always the same and in the same order, independent of the batch size."""

    def __init__(self, documents: Documents, length: int) -> None:
        self.documents, self.length = documents, length

    @cached_property
    def _plan(self) -> tuple[Plan, np.ndarray]:
        rng = np.random.default_rng(0)
        plan = Plan.draw(self.documents, self.length, rng)
        return plan, rng.permutation(plan.rows)

    def batches(self, rows: int, most: int | None = None) -> Iterator[PackedBatch]:
        """All rows, or the first `most`, in batches of `rows`; the last may be smaller."""
        plan, order = self._plan
        order = order[:most]
        for start in range(0, len(order), rows):
            yield plan.read(self.documents.text, order[start : start + rows], self.length)


def _chunks(tokens: int) -> Iterator[tuple[int, int]]:
    yield from ((first, min(CHUNK, tokens - first)) for first in range(0, tokens, CHUNK))


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64 [sum of counts]: the concatenated ranges start, start + 1, ... of the given counts."""
    return np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
