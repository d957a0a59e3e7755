"""Windows of running text in batches of one fixed shape without padding: shuffled for training, in order for scoring.

A window may contain the end of one document and the beginning of the next, which can then attend to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kilolayer.data.endless import EndlessBatches
from kilolayer.data.token_text import TokenText
from kilolayer.data.tokenizer import PAD
from kilolayer.errors import InputError
from kilolayer.terminal import counted


@dataclass(frozen=True)
class TextBatch:
    """Windows of one length."""

    inputs: Tensor
    """int64 [rows, length]: the model's input."""
    labels: Tensor
    """int64 [rows, length]: the token after each input. The loss must ignore padding, which occurs only in scoring."""
    tokens: int
    """Number of labels that are not padding: the weight of this batch's mean loss."""

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels."""
        return self.inputs, self.labels


class Windows(EndlessBatches[TextBatch]):
    """An endless iterator over batches of `rows` windows of `length` tokens.

    Each epoch cuts the text into windows that do not overlap, starting at a random offset, and shuffles them. Both depend only
    on (seed, epoch), so a position is three numbers. Windows that do not fill the last batch are left out of that epoch.
    """

    def __init__(self, text: TokenText, rows: int, length: int, seed: int = 0) -> None:
        super().__init__(seed, text.digest, rows, length)
        self.text, self.rows, self.length = text, rows, length
        # One fewer than fit, to leave room for the offset.
        self._count = (len(text) - length) // length
        if self._count < rows:
            raise InputError(
                f"a batch needs {counted(rows, 'window')} of {length} tokens, but the training text has {max(self._count, 0)}",
                where=str(text),
                fix="give more text, or lower batches.tokens or text.length",
            )
        self._planned: tuple[int, np.ndarray] | None = None

    def read(self, index: int) -> TextBatch:
        """The batch with this index in the current epoch."""
        starts = self._starts()[index * self.rows :][: self.rows]
        tokens = torch.from_numpy(self.text.read(starts, self.length + 1))
        return TextBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), self.rows * self.length)

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return self._count // self.rows

    @property
    def summary(self) -> str:
        """One line for the log: what the text is, and how it is batched."""
        return f"{self.text}; batches of {self.rows} x {self.length}"

    def _starts(self) -> np.ndarray:
        """int64 [windows]: the start of each window of this epoch, in shuffled order."""
        if self._planned is None or self._planned[0] != self.epoch:
            rng = np.random.default_rng([self.seed, self.epoch])
            first = rng.integers(self.length)
            self._planned = self.epoch, first + self.length * rng.permutation(self._count)
        return self._planned[1]


def windows_in_order(text: TokenText, rows: int, length: int, stride: int, most: int | None = None) -> Iterator[TextBatch]:
    """Windows in which every token but the first is a label once, in order; or only the first `most` windows.

    Windows start `stride` tokens apart, and a label counts only in the first window that contains it. So every label outside
    the first window has at least length - stride tokens of context.
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
