"""Filters of training pairs, and counts of what each rule removed."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kilolayer.config import bounded, check
from kilolayer.errors import InputError, OptionError
from kilolayer.terminal import counted


@dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """`[data.filters]`: what is left out of the training text. Validation and test text is never filtered."""

    max_tokens: int = bounded(256, least=1, most=2**24)
    """Maximum number of tokens per side; pairs with a longer side are left out, and counted."""
    max_ratio: float = bounded(9.0, least=0, most=1e9)
    """Maximum ratio of the number of tokens of the longer side to that of the shorter (9: the default of Moses'
    clean-corpus-n). 0: any ratio."""
    duplicates: bool = False
    """Keep pairs that have already occurred in the same corpus."""

    def __post_init__(self) -> None:
        check(self)
        if 0 < self.max_ratio < 1:
            raise OptionError(f"max_ratio is {self.max_ratio}", fix="allowed: 1 and more, or 0 for any ratio")


@dataclass(frozen=True, kw_only=True)
class FilterReport:
    """Pairs read and kept, and the number that each rule removed; a pair is counted under the first rule that removes it."""

    read: int = 0
    kept: int = 0
    empty: int = 0
    duplicate: int = 0
    too_long: int = 0
    ratio: int = 0

    def __add__(self, other: FilterReport) -> FilterReport:
        return FilterReport(**{name: value + getattr(other, name) for name, value in dataclasses.asdict(self).items()})

    def __str__(self) -> str:
        rules = {"empty": self.empty, "duplicates": self.duplicate, "too long": self.too_long, "length ratio": self.ratio}
        removed = ", ".join(f"{rule} {count:,}" for rule, count in rules.items() if count)
        return f"kept {self.kept:,} of {counted(self.read, 'pair')}" + (f" (removed: {removed})" if removed else "")


def drop_empty(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The pairs that have more than white space on both sides."""
    return [pair for pair in pairs if pair[0].strip() and pair[1].strip()]


def fits_length(source: Sequence[int], target: Sequence[int], config: FilterConfig) -> bool:
    """Whether neither side has more tokens than max_tokens."""
    return max(len(source), len(target)) <= config.max_tokens


def fits_ratio(source: Sequence[int], target: Sequence[int], config: FilterConfig) -> bool:
    """Whether the ratio of the longer side's tokens to the shorter's is within max_ratio; neither side may be empty."""
    shorter, longer = sorted((len(source), len(target)))
    return not config.max_ratio or longer <= config.max_ratio * shorter


class Seen:
    """A set of pairs, stored as 64-bit hashes in one array of 11 bytes per pair.

    Among 10 million pairs, the probability that two different pairs share a hash is 3e-6; the second is then taken for a
    duplicate.
    """

    def __init__(self, expected: int) -> None:
        self._slots = np.zeros(expected * 4 // 3 + 16, dtype=np.uint64)  # open addressing; 0 is a free slot
        self._room = expected

    def add(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """Add pairs; bool [pairs], True where a pair is new. At most `expected` pairs may be added in all."""
        hashes = np.fromiter(map(_hash, pairs), np.uint64, len(pairs))
        _, first = np.unique(hashes, return_index=True)
        self._room -= len(pairs)
        if self._room < 0:
            raise InputError(
                "the text has more pairs than when it was counted", fix="do not change the files while they are read"
            )
        new = np.zeros(len(pairs), dtype=bool)
        new[first] = self._insert(hashes[first])
        return new

    def _insert(self, hashes: np.ndarray) -> np.ndarray:
        """Insert distinct hashes; bool [hashes], True where a hash is new."""
        new = np.zeros(len(hashes), dtype=bool)
        slots = hashes % np.uint64(len(self._slots))
        open_ = np.arange(len(hashes))
        while len(open_):
            wanted, at = hashes[open_], slots[open_]
            free = self._slots[at] == 0
            self._slots[at[free]] = wanted[free]  # if several hashes want one slot, the last gets it
            settled = self._slots[at] == wanted
            new[open_[settled & free]] = True
            open_ = open_[~settled]
            slots[open_] = (slots[open_] + np.uint64(1)) % np.uint64(len(self._slots))
        return new


def _hash(pair: tuple[str, str]) -> int:
    digest = hashlib.blake2b("\n".join(pair).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1
