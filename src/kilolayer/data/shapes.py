"""Choose a few batch shapes (source length, target length) that hold all pairs of a corpus with little padding.

There are few, because each is compiled or captured once; they are fixed, because a captured step cannot change its shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kilolayer.config import bounded, check

LEVELS = 48  # distinct lengths per side; more cost time and save under 0.1% of padding


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """`[batches]`: how many tokens a step reads, and in which shapes."""

    tokens: int = bounded(4096, least=2, most=2**31)
    """Maximum number of tokens in a batch, source and target, padding included; 4096 is usual for one GPU."""
    shapes: int = bounded(12, least=1, most=254)
    """Maximum number of different batch shapes (rows, source length, target length). More shapes mean less padding, but more to
    compile."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, order=True)
class Shape:
    """The size of a batch: the number of rows, and the lengths to which their sources and targets are padded."""

    area: int
    """Tokens per row, padding included: source + target."""
    source: int
    target: int
    rows: int

    def holds(self, other: Shape) -> bool:
        """Whether every pair that fits the other shape fits this one."""
        return other.source <= self.source and other.target <= self.target


def make_shape(source: int, target: int, tokens: int) -> Shape:
    """The shape with these lengths and as many rows as `tokens` (padding included) allows, at least one.

    From 16 rows on, the number is a multiple of 8, which suits matrix units.
    """
    rows = max(tokens // (source + target), 1)
    return Shape(source + target, source, target, rows - rows % 8 if rows >= 16 else rows)


def choose_shapes(lengths: np.ndarray, counts: np.ndarray, tokens: int, most: int) -> list[Shape]:
    """At most `most` shapes in order of area; the last holds every pair.

    lengths: int [n, 2], the source and target lengths that occur; counts: float [n], how often. Starts with one shape for all
    pairs, and greedily adds the shape that saves the most padding, until none saves any.
    """
    levels = [_levels(lengths[:, side], counts) for side in (0, 1)]
    cells = np.zeros([len(level) for level in levels])
    np.add.at(cells, tuple(np.searchsorted(level, lengths[:, side]) for side, level in enumerate(levels)), counts)
    areas = np.add.outer(*levels)
    now = np.full(areas.shape, areas[-1, -1])  # cost so far of a pair of these lengths
    chosen = [(len(levels[0]) - 1, len(levels[1]) - 1)]
    while len(chosen) < most:
        i, j = max(np.ndindex(areas.shape), key=lambda corner: _saved(cells, now, areas, *corner))
        if _saved(cells, now, areas, i, j) <= 0:
            break
        chosen.append((i, j))
        now[: i + 1, : j + 1] = np.minimum(now[: i + 1, : j + 1], areas[i, j])
    return sorted({make_shape(int(levels[0][i]), int(levels[1][j]), tokens) for i, j in chosen})


def _saved(cells: np.ndarray, now: np.ndarray, areas: np.ndarray, i: int, j: int) -> float:
    return float((cells[: i + 1, : j + 1] * np.maximum(now[: i + 1, : j + 1] - areas[i, j], 0)).sum())


def _levels(lengths: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64 [at most LEVELS]: candidate lengths, the longest included, with about the same number of tokens between them."""
    order = np.argsort(lengths, kind="stable")
    mass = np.cumsum(lengths[order] * counts[order])
    steps = np.searchsorted(mass, np.linspace(0, mass[-1], LEVELS)[1:-1])
    return np.unique(np.append(lengths[order][steps], lengths.max())).astype(np.int64)


class Assignment:
    """Assigns each pair to the smallest shape that holds it."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        sources, targets = np.unique([shape.source for shape in shapes]), np.unique([shape.target for shape in shapes])
        table = np.full((len(sources), len(targets)), len(shapes), dtype=np.uint8)
        for number, shape in reversed(list(enumerate(shapes))):
            table[np.ix_(sources <= shape.source, targets <= shape.target)] = number
        self.identity = [sources.tolist(), targets.tolist(), table.tolist()]
        self._table = table.reshape(-1)
        # The row and the column of every length, looked up because a search takes several times as long.
        self._row = (np.searchsorted(sources, np.arange(sources[-1] + 1)) * len(targets)).astype(np.uint16)
        self._column = np.searchsorted(targets, np.arange(targets[-1] + 1)).astype(np.uint16)

    def __call__(self, source_lengths: np.ndarray, target_lengths: np.ndarray) -> np.ndarray:
        """uint8 [n]: the shape number of each pair; no pair may exceed the largest shape."""
        return self._table[self._row[source_lengths] + self._column[target_lengths]]
