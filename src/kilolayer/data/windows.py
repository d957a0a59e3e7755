"""Windows of running text as batches of one fixed shape, every row full: shuffled for training, in order for scoring.

A window may hold the end of one document and the beginning of the next, which then sees what stands before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kilolayer.data.batches import check_position
from kilolayer.data.token_text import TokenText
from kilolayer.data.tokenizer import PAD
from kilolayer.errors import InputError
from kilolayer.terminal import counted


@dataclass(frozen=True)
class TextBatch:
    """Windows of one length."""

    inputs: Tensor
    """int64 [rows, length]: what the model reads."""
    labels: Tensor
    """int64 [rows, length]: the token after each; padding, in scoring alone, is to be left out of the loss."""
    tokens: int
    """Labels that are not padding: the weight of the batch's mean loss."""

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels."""
        return self.inputs, self.labels


class Windows:
    """An endless iterator over batches of `rows` windows of `length` tokens.

    Each epoch cuts the text into windows that do not overlap, from a first place of its own on, and shuffles them. Both come
    from (seed, epoch) alone, so that a position is three numbers. What does not fill the last batch comes in other epochs.
    """

    def __init__(self, text: TokenText, rows: int, length: int, seed: int = 0) -> None:
        self.text, self.rows, self.length, self.seed = text, rows, length, seed
        self.epoch, self.index = 0, 0
        # One fewer than fit, so that the first place is free.
        self._count = (len(text) - length) // length
        if self._count < rows:
            raise InputError(
                f"a batch needs {counted(rows, 'window')} of {length} tokens, but the training text has {max(self._count, 0)}",
                where=str(text),
                fix="give more text, or lower batches.tokens or text.length",
            )
        self._planned: tuple[int, np.ndarray] | None = None
        identity = (seed, text.digest, rows, length)
        self._identity = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]

    def __iter__(self) -> Iterator[TextBatch]:
        return self

    def __next__(self) -> TextBatch:
        self.skip()
        starts = self._starts()[(self.index - 1) * self.rows :][: self.rows]
        tokens = torch.from_numpy(self.text.read(starts, self.length + 1))
        return TextBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), self.rows * self.length)

    def skip(self) -> None:
        """Pass over the next batch without reading it."""
        if self.index >= len(self):
            self.epoch, self.index = self.epoch + 1, 0
        self.index += 1

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self._count // self.rows

    @property
    def summary(self) -> str:
        """What the text is, and how it is batched."""
        return f"{self.text}; batches of {self.rows} x {self.length}"

    def state(self) -> dict[str, int | str]:
        """The position, as JSON holds it: `load_state` continues with the batch that would come next."""
        return {"epoch": self.epoch, "index": self.index, "seed": self.seed, "data": self._identity}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. It must come from the same text, shape and seed."""
        self.epoch, self.index = check_position(state, self._identity, self.seed)

    def _starts(self) -> np.ndarray:
        """int64 [windows]: where the windows of this epoch start, in their order."""
        if self._planned is None or self._planned[0] != self.epoch:
            rng = np.random.default_rng([self.seed, self.epoch])
            first = rng.integers(self.length)
            self._planned = self.epoch, first + self.length * rng.permutation(self._count)
        return self._planned[1]


def windows_in_order(text: TokenText, rows: int, length: int, stride: int, most: int | None = None) -> Iterator[TextBatch]:
    """Every token but the first as a label once, in order; or those of the first `most` windows.

    A window starts `stride` tokens behind the one before it, and only labels that no window before it had count. So each but
    those of the first window has at least length - stride tokens before it.
    """
    last = len(text) - 1
    count = 1 + max(0, -(-(last - length) // stride))
    count = count if most is None else min(count, most)
    for first in range(0, count, rows):
        starts = stride * np.arange(first, min(first + rows, count))
        line = text.read(starts[:1], min(int(starts[-1]) + length, last) + 1 - int(starts[0]))[0]
        line = np.pad(line, (0, int(starts[-1] - starts[0]) + length + 1 - len(line)), constant_values=PAD)
        tokens = np.lib.stride_tricks.sliding_window_view(line, length + 1)[starts - starts[0]]
        labels = tokens[:, 1:].copy()
        labels[starts > 0, : length - stride] = PAD
        yield TextBatch(torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(labels), int((labels != PAD).sum()))
