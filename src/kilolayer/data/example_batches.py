"""Examples as batches: START a END, or START a END END b END; shuffled for training, in order for scoring."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kilolayer.data.batches import check_position
from kilolayer.data.example_file import Example
from kilolayer.data.tokenizer import END, PAD, START
from kilolayer.data.vocabulary import TextVocabulary

PACE = 16  # tokens between the lengths of short batches
SHORT = 64


@dataclass(frozen=True)
class ExampleBatch:
    """Rows of one length."""

    tokens_of_rows: Tensor
    """int64 [rows, length], padded. Rows that are all padding fill up the last batch of an epoch, and do not count."""
    labels: Tensor
    """int64 [rows], the place of the class; or fp32 [rows], the number. 0 in rows that do not count."""
    tokens: int
    """Examples that count: the weight of the batch's mean loss."""

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """Tokens and labels."""
        return self.tokens_of_rows, self.labels


class EncodedExamples:
    """The tokens of some examples, one behind the other, and their labels.

    labels: int64 [examples], the places of their classes; fp32 [examples] where `classes` is empty; None where there are none.
    cut: how many were longer than `length` tokens; was_cut: which ones.
    """

    def __init__(self, examples: Sequence[Example], vocabulary: TextVocabulary, classes: Sequence[str], length: int) -> None:
        encoded = [encode_example(example.first, example.second, vocabulary, length) for example in examples]
        rows = [tokens for tokens, _ in encoded]
        self.was_cut = [cut for _, cut in encoded]
        self.cut = sum(self.was_cut)
        self.lengths = np.array([len(row) for row in rows], np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.tokens = np.concatenate(rows)
        self.length = length
        self.labels = _labels(examples, classes)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def digest(self) -> str:
        """What tells these examples apart from others."""
        labels = b"" if self.labels is None else self.labels.tobytes()
        return hashlib.sha256(self.tokens.tobytes() + self.lengths.tobytes() + labels).hexdigest()

    def batch(self, members: np.ndarray, rows: int) -> ExampleBatch:
        """Some examples by their places int [n], filled up to `rows`; padded to the smallest length that holds them."""
        lengths = self.lengths[members]
        width = padded_length(int(lengths.max()), self.length)
        tokens = np.full((rows, width), PAD, np.int64)
        for row, (start, count) in enumerate(zip(self.starts[members], lengths, strict=True)):
            tokens[row, :count] = self.tokens[start : start + count]
        known = np.zeros(len(self), np.int64) if self.labels is None else self.labels
        labels = np.zeros(rows, known.dtype)
        labels[: len(members)] = known[members]
        return ExampleBatch(torch.from_numpy(tokens), torch.from_numpy(labels), len(members))

    def in_order(self, rows: int, most: int | None = None) -> Iterator[tuple[np.ndarray, ExampleBatch]]:
        """Every example once, or the first `most` of them, those of like length together: their places, and the batch."""
        order = np.argsort(self.lengths[:most], kind="stable")
        for start in range(0, len(order), rows):
            members = order[start : start + rows]
            yield members, self.batch(members, rows)


class ExampleBatches:
    """An endless iterator over batches of `rows` examples, each epoch in an order that (seed, epoch) alone decides."""

    def __init__(self, examples: EncodedExamples, rows: int, seed: int = 0) -> None:
        self.examples, self.rows, self.seed = examples, rows, seed
        self.epoch, self.index = 0, 0
        self._planned: tuple[int, np.ndarray] | None = None
        identity = (seed, examples.digest, rows, examples.length)
        self._identity = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]

    def __iter__(self) -> Iterator[ExampleBatch]:
        return self

    def __next__(self) -> ExampleBatch:
        self.skip()
        members = self._order()[(self.index - 1) * self.rows :][: self.rows]
        return self.examples.batch(members, self.rows)

    def skip(self) -> None:
        """Pass over the next batch without reading it."""
        if self.index >= len(self):
            self.epoch, self.index = self.epoch + 1, 0
        self.index += 1

    def __len__(self) -> int:
        """Batches in an epoch; the last may be filled up."""
        return -(-len(self.examples) // self.rows)

    @property
    def summary(self) -> str:
        """What was read, and how it is batched."""
        cut = f", {self.examples.cut:,} cut to {self.examples.length}" if self.examples.cut else ""
        return f"{len(self.examples):,} examples, {len(self.examples.tokens):,} tokens{cut}; batches of {self.rows}"

    def state(self) -> dict[str, int | str]:
        """The position, as JSON holds it: `load_state` continues with the batch that would come next."""
        return {"epoch": self.epoch, "index": self.index, "seed": self.seed, "data": self._identity}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. It must come from the same examples, rows and seed."""
        self.epoch, self.index = check_position(state, self._identity, self.seed)

    def _order(self) -> np.ndarray:
        """int64 [examples]: the order of this epoch."""
        if self._planned is None or self._planned[0] != self.epoch:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.examples))
            self._planned = self.epoch, order
        return self._planned[1]


def encode_example(first: str, second: str | None, vocabulary: TextVocabulary, length: int) -> tuple[np.ndarray, bool]:
    """int64 [tokens]: START a END, or START a END END b END (RoBERTa's form), with one END between for WordPiece (BERT's form);
    at most `length`, the longer cut first. And whether something was cut.
    """
    a = vocabulary.encode(first.encode())
    if second is None:
        return np.concatenate([[START], a[: length - 2], [END]]), len(a) > length - 2
    b = vocabulary.encode(second.encode())
    ends = [END] * vocabulary.ends_between
    room = length - 2 - len(ends)
    kept = min(len(a), max(room - len(b), room - room // 2))
    return np.concatenate([[START], a[:kept], ends, b[: room - kept], [END]]), len(a) + len(b) > room


def padded_length(tokens: int, most: int) -> int:
    """Few lengths, so that few steps are recorded: multiples of 16 up to 64, then powers of two, and `most`."""
    width = -(-tokens // PACE) * PACE if tokens <= SHORT else 1 << (tokens - 1).bit_length()
    return min(width, most)


def real_rows(tokens: Tensor) -> Tensor:
    """bool [rows]: those of int64 [rows, length] that are not padding alone."""
    return tokens[:, 0] != PAD


def sentence_types(tokens: Tensor) -> Tensor:
    """int64 [rows, length]: 0 up to the first END of each row of int64 [rows, length], with it, and 1 behind it."""
    ends = (tokens == END).long()
    return (ends.cumsum(dim=1) - ends).clamp(max=1)


def _labels(examples: Sequence[Example], classes: Sequence[str]) -> np.ndarray | None:
    if examples[0].label is None:
        return None
    if not classes:
        return np.array([example.label for example in examples], np.float32)
    places = {name: place for place, name in enumerate(classes)}
    return np.array([places[str(example.label)] for example in examples], np.int64)
