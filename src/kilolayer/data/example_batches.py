"""Batches of classification examples: START a END, or START a END END b END; shuffled for training, in order for scoring."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kilolayer.data.all_over import members_all_over
from kilolayer.data.endless import EndlessBatches
from kilolayer.data.example_file import Example
from kilolayer.data.tokenizer import END, PAD, START
from kilolayer.data.vocabulary import TextVocabulary
from kilolayer.terminal import counted

PACE = 16  # step between the padded lengths of short batches, in tokens
SHORT = 64


@dataclass(frozen=True)
class ExampleBatch:
    """Examples padded to one length."""

    tokens_of_rows: Tensor
    """int64 [rows, length], padded. The last batch of an epoch is filled up with rows of padding, which do not count."""
    labels: Tensor
    """int64 [rows], class indices; or fp32 [rows], numbers. 0 in rows of padding."""
    tokens: int
    """Number of examples, without rows of padding: the weight of this batch's mean loss."""

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """Tokens and labels."""
        return self.tokens_of_rows, self.labels


class EncodedExamples:
    """The concatenated tokens of examples, and their labels.

    labels: int64 [examples], class indices; fp32 [examples] if `classes` is empty; None if the examples have no labels.
    cut: number of examples that were longer than `length` tokens; was_cut: which ones.
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
        """A digest that identifies these examples."""
        labels = b"" if self.labels is None else self.labels.tobytes()
        return hashlib.sha256(self.tokens.tobytes() + self.lengths.tobytes() + labels).hexdigest()

    def batch(self, members: np.ndarray, rows: int) -> ExampleBatch:
        """The examples with indices `members`, int [n], filled up to `rows` and padded to the smallest allowed length."""
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
        """Every example once, or `most` from all over the set, grouped by similar length: the place of each, and the batch.

        Places, int64 [n], count those that are read.
        """
        members = members_all_over(len(self), most)
        order = np.argsort(self.lengths[members], kind="stable")
        for start in range(0, len(order), rows):
            places = order[start : start + rows]
            yield places, self.batch(members[places], rows)


class ExampleBatches(EndlessBatches[ExampleBatch]):
    """An endless iterator over batches of `rows` examples; the order of each epoch depends only on (seed, epoch)."""

    def __init__(self, examples: EncodedExamples, rows: int, seed: int = 0) -> None:
        super().__init__(seed, examples.digest, rows, examples.length)
        self.examples, self.rows = examples, rows
        self._planned: tuple[int, np.ndarray] | None = None

    def read(self, index: int) -> ExampleBatch:
        """The batch with this index in the current epoch."""
        members = self._order()[index * self.rows :][: self.rows]
        return self.examples.batch(members, self.rows)

    def __len__(self) -> int:
        """Number of batches in an epoch, including a last one that may be filled up."""
        return -(-len(self.examples) // self.rows)

    @property
    def summary(self) -> str:
        """One line for the log: what was read, and how it is batched."""
        cut = f", {self.examples.cut:,} cut to {self.examples.length}" if self.examples.cut else ""
        read = f"{counted(len(self.examples), 'example')}, {counted(len(self.examples.tokens), 'token')}"
        return f"{read}{cut}; batches of {self.rows}"

    def _order(self) -> np.ndarray:
        """int64 [examples]: the order of this epoch."""
        if self._planned is None or self._planned[0] != self.epoch:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.examples))
            self._planned = self.epoch, order
        return self._planned[1]


def encode_example(first: str, second: str | None, vocabulary: TextVocabulary, length: int) -> tuple[np.ndarray, bool]:
    """Encode one or two sentences, and say whether anything was truncated.

    Returns int64 [tokens]: START a END, or START a END END b END as in RoBERTa; with WordPiece, one END between the sentences
    as in BERT. At most `length` tokens; the longer sentence is truncated first.
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
    """The length to pad to: multiples of 16 up to 64, then powers of two, and `most`; few lengths mean few recorded steps."""
    width = -(-tokens // PACE) * PACE if tokens <= SHORT else 1 << (tokens - 1).bit_length()
    return min(width, most)


def real_rows(tokens: Tensor) -> Tensor:
    """bool [rows]: which rows of `tokens`, int64 [rows, length], are not all padding."""
    return tokens[:, 0] != PAD


def sentence_types(tokens: Tensor) -> Tensor:
    """Token types, int64 [rows, length], of tokens int64 [rows, length]: 0 up to and including the first END, then 1."""
    ends = (tokens == END).long()
    return (ends.cumsum(dim=1) - ends).clamp(max=1)


def _labels(examples: Sequence[Example], classes: Sequence[str]) -> np.ndarray | None:
    if examples[0].label is None:
        return None
    if not classes:
        return np.array([example.label for example in examples], np.float32)
    indices = {name: index for index, name in enumerate(classes)}
    return np.array([indices[str(example.label)] for example in examples], np.int64)
