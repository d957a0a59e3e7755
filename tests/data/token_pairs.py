"""Small token files for tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from kilolayer.data.filters import FilterReport
from kilolayer.data.store import PairWriter, TokenPairs

Lengths = list[tuple[int, int]]


def write_pairs(
    folder: Path, pairs: Iterable[tuple[Sequence[int], Sequence[int]]], vocab_size: int, report: FilterReport | None = None
) -> TokenPairs:
    """The token files of pairs that are already tokens, in an existing folder."""
    with PairWriter(folder, vocab_size) as writer:
        for source, target in pairs:
            writer.append([source], [target])
        writer.finish(report or FilterReport(read=writer.pairs, kept=writer.pairs))
    return TokenPairs(folder)


def make_pairs(folder: Path, lengths: Lengths, first: int = 0, vocab_size: int = 10_000) -> TokenPairs:
    """Pairs of these lengths; each pair's tokens before the end are its own number + 10."""
    folder.mkdir(parents=True)
    rows = [([first + i + 10] * (s - 1) + [3], [first + i + 10] * (t - 1) + [3]) for i, (s, t) in enumerate(lengths)]
    return write_pairs(folder, rows, vocab_size)


def random_lengths(count: int, seed: int = 0) -> Lengths:
    """Lengths of 2 to 31 tokens, the two sides alike."""
    rng = np.random.default_rng(seed)
    source = rng.integers(2, 28, count)
    target = np.clip(source + rng.integers(-4, 5, count), 2, None)
    return list(zip(source.tolist(), target.tolist(), strict=True))
