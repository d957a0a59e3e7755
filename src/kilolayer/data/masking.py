"""Masking for masked language models: which tokens are hidden, and what replaces them.

In each row round(rate x tokens) tokens are hidden, at least one; start, end and padding never are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kilolayer.config import bounded, check
from kilolayer.data.endless import EndlessBatches
from kilolayer.data.packing import EDGES, FixedRows, PackedBatch, PackedText, ranges
from kilolayer.data.tokenizer import END, PAD
from kilolayer.errors import OptionError

LONGEST_SPAN = 10  # Joshi et al. 2020, SpanBERT, section 3.1
TRAINING, HELD_OUT = 1, 2  # keep the keys of random generators distinct


@dataclass(frozen=True, kw_only=True)
class MaskingConfig:
    """`[masking]`: what is hidden of each row."""

    rate: float = bounded(0.15, above=0, most=0.9)
    """Fraction of the tokens to predict; start, end and padding are not counted."""
    span: float = bounded(1.0, least=1, most=5)
    """Mean length of a masked span. 1: single tokens; above 1: geometrically distributed lengths of at most 10 tokens."""
    keep: float = bounded(0.0, least=0, most=1)
    """Fraction of the tokens to predict that are left unchanged in the input; BERT uses 0.1."""
    random: float = bounded(0.0, least=0, most=1)
    """Fraction of the tokens to predict that are replaced by a random token of the vocabulary; BERT uses 0.1. The rest are
    replaced by the mask."""

    def __post_init__(self) -> None:
        check(self)
        if self.keep + self.random > 1:
            raise OptionError(f"keep and random are {self.keep + self.random:g} together", fix="lower them: 0.1 each is usual")

    def max_masked(self, length: int) -> int:
        """The maximum number of tokens that are hidden in a row of `length` tokens."""
        return int(self.counts(np.array([max(1, length - EDGES)]))[0])

    def counts(self, tokens: np.ndarray) -> np.ndarray:
        """How many tokens to hide, for rows with the given numbers of tokens, int [rows]."""
        return np.where(tokens > 0, np.maximum(np.rint(self.rate * tokens), 1), 0).astype(np.int64)


@dataclass(frozen=True)
class MaskedBatch:
    """Rows with hidden tokens. Whether `real` and `segments` are present determines the number of parts."""

    packed: PackedBatch
    """The rows, with hidden tokens replaced."""
    positions: Tensor
    """int64 [rows, most]: the positions of hidden tokens, in order; unused entries are 0."""
    labels: Tensor
    """int64 [rows, most]: the original tokens; 0 in unused entries."""
    tokens: int
    """Number of labels in use: the weight of this batch's mean loss."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Tokens; `real` if there is padding; `segments` if pieces share rows; positions and labels."""
        seen = (self.packed.tokens, self.packed.real, self.packed.segments)
        return (*(each for each in seen if each is not None), self.positions, self.labels)


def inputs_of(parts: Sequence[Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """The encoder's arguments, and the labels, from the parts of a `MaskedBatch`."""
    *inputs, positions, labels = parts
    return {**dict(zip(("tokens", "mask", "segments"), inputs, strict=False)), "positions": positions}, labels


class Masker:
    """Hides tokens. The mask's id follows the vocabulary's last id."""

    def __init__(self, config: MaskingConfig, length: int, vocab_size: int) -> None:
        self.config, self.length, self.vocab_size, self.mask = config, length, vocab_size, vocab_size
        self.most = config.max_masked(length)
        self._lengths = span_lengths(config.span)

    def mask_tokens(self, tokens: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Mask rows, int64 [rows, length]. Returns the masked rows, and positions and labels, int64 [rows, most] each."""
        hidden = self._draw(tokens > END, rng)
        counts = hidden.sum(axis=1)
        at = np.nonzero(hidden)
        used = np.arange(self.most) < counts[:, None]
        positions, labels = (np.zeros((len(tokens), self.most), np.int64) for _ in range(2))
        positions[used], labels[used] = at[1], tokens[at]
        masked = tokens.copy()
        masked[at] = self._replacements(tokens[at], rng)
        return masked, positions, labels

    def _draw(self, ordinary: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """bool [rows, length]: which tokens to hide, among those that may be hidden, `ordinary` bool [rows, length].

        Unhidden tokens and spans are units that are put in a uniformly random order. A span that would cross the end of a
        piece continues in the next piece of the row, and from the last piece in the first.
        """
        tokens = ordinary.sum(axis=1)
        hidden = self.config.counts(tokens)
        lengths = self._span_lengths(hidden, rng)
        spans = (lengths > 0).sum(axis=1)
        # Positions of the spans among all units, drawn without replacement, in random order.
        keys = rng.random(ordinary.shape)
        keys[np.arange(ordinary.shape[1]) >= (tokens - hidden + spans)[:, None]] = 2.0
        units = np.argpartition(keys, self.most - 1, axis=1)[:, : self.most]
        units = np.take_along_axis(units, np.argsort(np.take_along_axis(keys, units, 1), axis=1), 1)
        units[np.arange(self.most) >= spans[:, None]] = ordinary.shape[1]
        order = np.argsort(units, axis=1)
        units, lengths = np.take_along_axis(units, order, 1), np.take_along_axis(lengths, order, 1)
        # Before the s-th span there are s spans, and unhidden tokens.
        starts = units - np.arange(self.most) + np.cumsum(lengths, axis=1) - lengths
        starts += rng.integers(np.maximum(tokens, 1))[:, None]  # otherwise fewer spans would reach the first and last tokens
        row = np.repeat(np.arange(len(ordinary)), hidden)
        chosen = np.zeros(ordinary.shape, bool)
        chosen[row, ranges(starts.reshape(-1), lengths.reshape(-1)) % tokens[row]] = True
        # Map the n-th chosen flag to the n-th token that may be hidden.
        found = np.zeros_like(ordinary)
        found[ordinary] = chosen[np.arange(ordinary.shape[1]) < tokens[:, None]]
        return found

    def _span_lengths(self, hidden: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """int64 [rows, most]: span lengths that hide `hidden` tokens, int64 [rows]; the last is shortened, then 0."""
        shape = (len(hidden), self.most)
        drawn = np.ones(shape, np.int64)
        if len(self._lengths) > 1:
            drawn = 1 + np.searchsorted(np.cumsum(self._lengths)[:-1], rng.random(shape), side="right")
        before = np.cumsum(drawn, axis=1) - drawn
        return np.clip(hidden[:, None] - before, 0, drawn)

    def _replacements(self, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """What replaces hidden tokens, int64 [n]."""
        found = np.full_like(labels, self.mask)
        keep, random = self.config.keep, self.config.random
        if keep or random:
            kind = rng.random(labels.shape)
            found = np.where(kind < keep + random, rng.integers(END + 1, self.vocab_size, labels.shape), found)
            found = np.where(kind < keep, labels, found)
        return found


def span_lengths(mean: float) -> np.ndarray:
    """float [longest]: the probability of each length from 1, a truncated geometric distribution with the given mean."""
    if mean == 1:
        return np.ones(1)
    lengths = np.arange(1, LONGEST_SPAN + 1)
    low, high = 0.0, 1.0  # bisection bounds of the ratio between the probabilities of successive lengths
    for _ in range(60):
        middle = (low + high) / 2
        shares = middle ** (lengths - 1)
        low, high = (middle, high) if shares @ lengths < mean * shares.sum() else (low, middle)
    shares = low ** (lengths - 1)
    return shares / shares.sum()


class MaskedText(EndlessBatches[MaskedBatch]):
    """Packed text with new masks in each epoch, which depend only on (seed, epoch, batch index)."""

    def __init__(self, packed: PackedText, masker: Masker) -> None:
        super().__init__(packed.seed)
        self.packed, self.masker = packed, masker
        identity = (packed.identity, masker.config, masker.vocab_size)
        self.identity = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]

    def read(self, index: int) -> MaskedBatch:
        """The batch with this index in the current epoch."""
        packed = self._at_epoch().read(index)
        rng = np.random.default_rng([TRAINING, self.seed, self.epoch, index + 1])
        return _batch(packed, *self.masker.mask_tokens(packed.tokens.numpy(), rng))

    def __len__(self) -> int:
        """Number of batches in the current epoch."""
        return len(self._at_epoch())

    @property
    def summary(self) -> str:
        """One line for the log: what the text is, and how it is packed."""
        return self._at_epoch().summary

    def _at_epoch(self) -> PackedText:
        self.packed.epoch = self.epoch
        return self.packed


def fixed_masks(rows: FixedRows, masker: Masker, size: int, most: int | None = None) -> Iterator[MaskedBatch]:
    """All rows, or the first `most`, with fixed masks, in batches of `size`; the last may be smaller."""
    first = 0
    for packed in rows.batches(size, most):
        # Each row has its own generator, so the masks do not depend on how rows are batched.
        found = [
            masker.mask_tokens(row[None], np.random.default_rng([HELD_OUT, first + number]))
            for number, row in enumerate(packed.tokens.numpy())
        ]
        first += len(found)
        yield _batch(packed, *(np.concatenate(each) for each in zip(*found, strict=True)))


def _batch(packed: PackedBatch, tokens: np.ndarray, positions: np.ndarray, labels: np.ndarray) -> MaskedBatch:
    masked = PackedBatch(torch.from_numpy(tokens), packed.real, packed.segments)
    return MaskedBatch(masked, torch.from_numpy(positions), torch.from_numpy(labels), int((labels != PAD).sum()))
