"""Encode sentence pairs, and leave out those whose tokens the filters refuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from kilolayer.data.filters import FilterConfig, FilterReport, fits_length, fits_ratio
from kilolayer.data.parallel import Pair
from kilolayer.data.tokenizer import END, Tokenizers


class Chunk(NamedTuple):
    """Some pairs of a text, and what has been removed from among them so far."""

    pairs: list[Pair]
    report: FilterReport


class EncodedChunk(NamedTuple):
    """Tokens [n]: source, target, source, target, ...; the length of each source and target, int64 [pairs]."""

    tokens: np.ndarray
    source_lengths: np.ndarray
    target_lengths: np.ndarray
    report: FilterReport


@dataclass(frozen=True)
class PairEncoder:
    """Encodes pairs as: prefix source end, target end. filters: leave out pairs by their tokens; None: every pair is kept."""

    tokenizers: Tokenizers
    prefix: Sequence[int]
    filters: FilterConfig | None

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        sources = self.tokenizers.source.encode([source for source, _ in chunk.pairs])
        targets = self.tokenizers.target.encode([target for _, target in chunk.pairs])
        kept, report = list(zip(sources, targets, strict=True)), FilterReport(kept=len(sources))
        if self.filters is not None:
            kept, report = self._filtered(kept, self.filters)
        rows = [([*self.prefix, *source, END], [*target, END]) for source, target in kept]
        lengths = np.array([(len(source), len(target)) for source, target in rows], np.int64).reshape(-1, 2)
        tokens = np.fromiter(chain.from_iterable(chain.from_iterable(rows)), np.uint32, int(lengths.sum()))
        return EncodedChunk(tokens, lengths[:, 0], lengths[:, 1], chunk.report + report)

    @staticmethod
    def _filtered(
        tokens: list[tuple[list[int], list[int]]], filters: FilterConfig
    ) -> tuple[list[tuple[list[int], list[int]]], FilterReport]:
        spoken = [pair for pair in tokens if pair[0] and pair[1]]  # text that consists only of control characters has no tokens
        short = [pair for pair in spoken if fits_length(*pair, filters)]
        kept = [pair for pair in short if fits_ratio(*pair, filters)]
        empty, too_long, ratio = len(tokens) - len(spoken), len(spoken) - len(short), len(short) - len(kept)
        return kept, FilterReport(kept=len(kept), empty=empty, too_long=too_long, ratio=ratio)
