"""Batches of sentence pairs by token count: shuffled, in a few fixed shapes, with a position that can be saved and restored.

The batches of an epoch depend only on (seed, epoch), so a position is three numbers: seed, epoch and index. A small epoch is
shuffled as a whole; one of more than WHOLE_EPOCH pairs in sections, so that its pairs are never all in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kilolayer.data.all_over import members_all_over
from kilolayer.data.endless import EndlessBatches
from kilolayer.data.mixing import Mixture, Part
from kilolayer.data.sections import Sections, cached_lengths
from kilolayer.data.shapes import Assignment, BatchConfig, Shape, choose_shapes, make_shape
from kilolayer.data.store import TokenPairs
from kilolayer.data.tokenizer import PAD, START
from kilolayer.errors import OptionError

WHOLE_EPOCH = 1 << 25
"""Maximum number of pairs in an epoch that is shuffled as a whole: 0.8 GB of memory, and 8 seconds at the start."""


@dataclass(frozen=True)
class Batch:
    """A batch of rows padded to one shape. The last batches of an epoch are filled up with rows of padding."""

    source: Tensor
    """int64 [rows, source]: [tag] [<bt>] tokens end."""
    target: Tensor
    """int64 [rows, target]: start tokens; the decoder's input."""
    labels: Tensor
    """int64 [rows, target]: tokens end; the expected output. The loss must ignore padding."""
    tokens: int
    """Number of labels that are not padding: the weight of this batch's mean loss."""

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Source, target and labels."""
        return self.source, self.target, self.labels


@dataclass(frozen=True)
class _Plan:
    """The batches of an epoch, or of a section of one: which pairs are in each, and in which shape."""

    members: np.ndarray
    """int32 [pairs]: the pairs grouped by shape, from the smallest to the largest, and shuffled within each."""
    tails: np.ndarray
    """int32 [n]: the pairs of those batches that are not a contiguous slice of `members`."""
    table: np.ndarray
    """int64 [batches, 3]: shape number, start, number of pairs. A start at or beyond len(members) is an offset into `tails`."""

    def batch(self, index: int) -> tuple[int, np.ndarray]:
        """The shape number of a batch, and its pairs."""
        number, start, count = self.table[index].tolist()
        behind = start - len(self.members)
        return number, self.members[start : start + count] if behind < 0 else self.tails[behind : behind + count]


class Batches(EndlessBatches[Batch]):
    """An endless iterator over shuffled batches; every pair of an epoch of the mixture is in exactly one batch."""

    def __init__(
        self,
        pairs: Mixture | TokenPairs,
        config: BatchConfig,
        seed: int = 0,
        cache: Path | None = None,
        whole: int = WHOLE_EPOCH,
    ) -> None:
        """cache: where the tables of a large mixture are kept. whole: the most pairs that are shuffled as a whole epoch."""
        self.mixture = pairs if isinstance(pairs, Mixture) else Mixture([Part(pairs)])
        large = len(self.mixture) > whole
        lengths, counts = cached_lengths(self.mixture, cache) if large else self.mixture.lengths()
        self._tokens = float(lengths.sum(1) @ counts)
        self.shapes = choose_shapes(lengths, counts, config.tokens, config.shapes)
        if self.shapes[-1].area > config.tokens:
            raise OptionError(
                f"a batch of {config.tokens} tokens cannot hold {self.shapes[-1].source} + {self.shapes[-1].target}",
                where="the longest source and target",
                fix="raise batches.tokens, or lower data.filters.max_tokens",
            )
        self._assign = Assignment(self.shapes)
        self._planned: tuple[int, int, _Plan] | None = None
        self._counted: tuple[int, np.ndarray] | None = None
        identity = [part.pairs.digest for part in self.mixture.parts], self.mixture.quotas, self.shapes
        super().__init__(seed, *identity)
        self._whole_identity = self.identity
        self._sections = Sections(self.mixture, self._assign, len(self.shapes), seed, cache) if large else None
        if self._sections is not None:
            super().__init__(seed, *identity, self._sections.identity)

    def read(self, index: int) -> Batch:
        """The batch with this index in the current epoch."""
        section = 0
        if self._sections is not None:
            ends = np.cumsum(self._batches_by_shape().sum(1))
            section = int(np.searchsorted(ends, index, side="right"))
            index -= int(ends[section - 1]) if section else 0
        number, pairs = self._plan(section).batch(index)
        return _batch(self.mixture, pairs, self.shapes[number])

    def __len__(self) -> int:
        """Number of batches in the current epoch."""
        return len(self._plan().table) if self._sections is None else int(self._batches_by_shape().sum())

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a saved position. One in an epoch that was shuffled as a whole continues so, whatever its size."""
        if state.get("data") == self._whole_identity:
            self._sections, self._planned, self.identity = None, None, self._whole_identity
        super().load_state(state)

    @property
    def padding(self) -> float:
        """The fraction of padding among all positions of the current epoch's batches; in sections, of a mean epoch's."""
        cells = [shape.area * shape.rows for shape in self.shapes]
        if self._sections is not None:
            return 1 - self._tokens / float((self._batches_by_shape() @ cells).sum())
        numbers, _, _ = self._plan().table.T
        real = sum(
            int(part.pairs.source_lengths[few].sum()) + int(part.pairs.target_lengths[few].sum())
            for part, _, few in self.mixture.epoch(self.epoch, self.seed)
        )
        return 1 - real / sum(cells[number] for number in numbers.tolist())

    @property
    def summary(self) -> str:
        """One line for the log: what the filters removed, and how the rest is batched."""
        return f"{self.mixture.report}; {len(self.shapes)} batch shapes, {self.padding:.1%} padding"

    def _plan(self, section: int = 0) -> _Plan:
        if self._planned is None or self._planned[:2] != (self.epoch, section):
            self._planned = None  # holding two plans would double the memory
            place = [self.epoch] if self._sections is None else [self.epoch, section]
            chunks = self._epoch() if self._sections is None else self._sections.chunks(self.epoch, section)
            self._planned = self.epoch, section, self._make_plan(chunks, np.random.default_rng([self.seed, *place]))
        return self._planned[2]

    def _batches_by_shape(self) -> np.ndarray:
        """int64 [sections, shapes]: the number of batches of each shape in the sections of this epoch."""
        assert self._sections is not None
        if self._counted is None or self._counted[0] != self.epoch:
            counts = self._sections.counts(self.epoch).tolist()
            self._counted = self.epoch, np.array([count_batches(self.shapes, each) for each in counts])
        return self._counted[1]

    def _epoch(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All pairs of the epoch: their numbers in the mixture, int32 [n], and their shapes, uint8 [n]."""
        for part, base, pairs in self.mixture.epoch(self.epoch, self.seed):
            yield pairs + np.int32(base), self._assign(part.pairs.source_lengths[pairs], part.pairs.target_lengths[pairs])
            part.pairs.release()

    def _make_plan(self, chunks: Iterable[tuple[np.ndarray, np.ndarray]], rng: np.random.Generator) -> _Plan:
        members, counts = _grouped(chunks, len(self.shapes))
        table: list[tuple[int, int, int]] = []
        tails: list[np.ndarray] = []
        moved: dict[int, list[np.ndarray]] = {}  # leftover pairs that did not fill a batch of a smaller shape
        end, behind = 0, len(members)
        for number, shape in enumerate(self.shapes):
            start, end = end, end + counts[number]
            rng.shuffle(members[start:end])
            whole = end - counts[number] % shape.rows
            table += [(number, first, shape.rows) for first in range(start, whole, shape.rows)]
            rest = np.concatenate([members[whole:end], *moved.pop(number, [])])
            larger = _better_shape(self.shapes, number, len(rest) % shape.rows)
            if larger is not None:
                full = len(rest) - len(rest) % shape.rows
                moved.setdefault(larger, []).append(rest[full:])
                rest = rest[:full]
            for first in range(0, len(rest), shape.rows):
                count = min(shape.rows, len(rest) - first)
                table.append((number, behind + first, count))
            tails.append(rest)
            behind += len(rest)
        order = rng.permutation(len(table))
        return _Plan(members, np.concatenate(tails), np.array(table, np.int64)[order])


def _grouped(pairs_and_shapes: Iterable[tuple[np.ndarray, np.ndarray]], shapes: int) -> tuple[np.ndarray, list[int]]:
    """The pairs grouped by shape, the smallest first, int32 [pairs]; and the number of pairs of each shape."""
    chunks = list(pairs_and_shapes)
    counts = sum(np.bincount(kinds, minlength=shapes) for _, kinds in chunks)
    assert isinstance(counts, np.ndarray)
    members = np.empty(int(counts.sum()), np.int32)
    starts = np.cumsum(counts) - counts
    for pairs, kinds in chunks:
        for number in np.unique(kinds):
            own = pairs[kinds == number]
            members[starts[number] : starts[number] + len(own)] = own
            starts[number] += len(own)
    return members, counts.tolist()


def count_batches(shapes: Sequence[Shape], counts: Sequence[int]) -> list[int]:
    """The number of batches of each shape for `counts` pairs of each shape."""
    batches, moved = [0] * len(shapes), [0] * len(shapes)
    for number, shape in enumerate(shapes):
        left = counts[number] % shape.rows + moved[number]
        larger = _better_shape(shapes, number, left % shape.rows)
        if larger is not None:
            moved[larger] += left % shape.rows
            left -= left % shape.rows
        batches[number] = counts[number] // shape.rows + -(-left // shape.rows)
    return batches


def in_order(pairs: TokenPairs, config: BatchConfig, shapes: Sequence[Shape] = (), most: int | None = None) -> Iterator[Batch]:
    """Every pair once, or `most` pairs from all over the set, in a fixed order, for validation.

    shapes: the training shapes; one more is added if a pair fits none of them. Without them, shapes are chosen for `pairs`.
    """
    mixture = Mixture([Part(pairs)])
    members = members_all_over(pairs.pairs, most)
    sources, targets = pairs.source_lengths[members], pairs.target_lengths[members]
    longest = make_shape(int(sources.max()), int(targets.max()), config.tokens)
    if not shapes:
        shapes = choose_shapes(*mixture.lengths(), config.tokens, config.shapes)
    elif not any(shape.holds(longest) for shape in shapes):
        shapes = sorted([*shapes, longest])
    kinds = Assignment(shapes)(sources, targets)
    for number, shape in enumerate(shapes):
        own = members[kinds == number]
        for start in range(0, len(own), shape.rows):
            few = own[start : start + shape.rows]
            yield _batch(mixture, few, replace(shape, rows=len(few)))


def _better_shape(shapes: Sequence[Shape], number: int, left: int) -> int | None:
    """The next larger shape, if moving the `left` pairs there adds fewer padded positions than empty rows would add here."""
    shape = shapes[number]
    larger = next((other for other in range(number + 1, len(shapes)) if shapes[other].holds(shape)), None)
    if larger is None or not left:
        return None
    return larger if left * (shapes[larger].area - shape.area) < (shape.rows - left) * shape.area else None


def _batch(mixture: Mixture, pairs: np.ndarray, shape: Shape) -> Batch:
    source = np.full((shape.rows, shape.source), PAD, np.int64)
    labels = np.full((shape.rows, shape.target), PAD, np.int64)
    source[: len(pairs)], labels[: len(pairs)] = mixture.rows(pairs, shape.source, shape.target)
    real = labels != PAD
    target = np.empty_like(labels)
    target[:, 0], target[:, 1:] = START, labels[:, :-1]
    target[~real] = PAD
    tensors = (torch.from_numpy(each) for each in (source, target, labels))
    return Batch(*tensors, tokens=int(real.sum()))
