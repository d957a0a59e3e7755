"""Lay out sequences with a common prefix so that the prefix is read once.

A row holds the shared prefix, followed by the rest of each sequence, its branches, side by side. A branch attends to the prefix
and to itself, and its positions continue those of the prefix:

    a b c | d e | f        stands for   a b c d e   and   a b c f
    0 1 2 | 3 4 | 3        positions
    0 0 0 | 1 1 | 2        branches
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kilolayer.layers.context import TokenPositions, make_context
from kilolayer.layers.mask import Mask
from kilolayer.models.decoder import Decoder

LONGEST_ROW = 2048
"""Maximum number of tokens in a row with branches, because attention compares all positions of a row."""
LEAST_SHARED = 0.25
"""Minimum fraction of a sequence's tokens to share; less is not worth a longer row."""
FILLING = -1


@dataclass(frozen=True)
class Window:
    """Tokens [n], at most the context length plus one; the last `scored` of them are predicted."""

    tokens: np.ndarray
    scored: int

    @property
    def inputs(self) -> np.ndarray:
        """The model's input: all tokens but the last, which is only predicted."""
        return self.tokens[:-1]


@dataclass(frozen=True)
class Row:
    """Windows, by index, whose inputs share the first `shared` tokens."""

    numbers: list[int]
    shared: int
    length: int
    """Tokens in the row: the shared prefix and all branches."""


@dataclass(frozen=True)
class Batch:
    """Rows as arrays [rows, length] of tokens, positions and branches, and what is predicted at which position.

    at: int [predictions], the index into the flattened rows from which the token `targets` of the window `windows` is
    predicted.
    """

    tokens: np.ndarray
    positions: np.ndarray
    branches: np.ndarray
    at: np.ndarray
    targets: np.ndarray
    windows: np.ndarray


def group_by_prefix(windows: Sequence[Window]) -> list[Row]:
    """Group all windows into rows with few tokens in total, by comparing neighbours in lexicographic order."""
    # As big-endian bytes, token sequences sort by their tokens.
    keys = [window.inputs.astype(">u4").tobytes() for window in windows]
    rows: list[Row] = []
    before: np.ndarray = np.empty(0, np.int64)
    for number in sorted(range(len(windows)), key=keys.__getitem__):
        inputs = windows[number].inputs
        joined = _joined(rows[-1], number, len(inputs), _common(before, inputs)) if rows else None
        if joined is None:
            rows.append(Row([number], len(inputs), len(inputs)))
        else:
            rows[-1] = joined
        before = inputs
    return rows


def _joined(row: Row, number: int, length: int, common: int) -> Row | None:
    """The row with one more window, which shares `common` tokens with the last one; None if that saves nothing.

    In sorted order, the prefix that all windows share is the shortest that two neighbours share.
    """
    count, shared = len(row.numbers), min(row.shared, common)
    longer = row.length + (count - 1) * row.shared - count * shared + length
    if longer >= row.length + length or longer > LONGEST_ROW or shared < LEAST_SHARED * length:
        return None
    return Row([*row.numbers, number], shared, longer)


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """The length of the common prefix of two sequences."""
    length = min(len(first), len(second))
    differ = first[:length] != second[:length]
    return int(differ.argmax()) if differ.any() else length


def batches(windows: Sequence[Window], rows: Sequence[Row], most: int) -> Iterator[Batch]:
    """Rows of similar length together, longest first, with at most `most` tokens including padding (or a single row)."""
    rest = sorted(rows, key=lambda row: -row.length)
    while rest:
        count = max(1, most // max(1, rest[0].length))
        yield _batch(windows, rest[:count])
        rest = rest[count:]


def _batch(windows: Sequence[Window], rows: Sequence[Row]) -> Batch:
    shape = (len(rows), rows[0].length)
    tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    branches = np.full(shape, FILLING, np.int64)
    at, targets, owners = [], [], []
    for index, row in enumerate(rows):
        end = row.shared
        tokens[index, :end] = windows[row.numbers[0]].inputs[:end]
        positions[index, :end] = np.arange(end)
        branches[index, :end] = 0
        for branch, number in enumerate(row.numbers, 1):
            window = windows[number]
            begin, end = end, end + len(window.inputs) - row.shared
            tokens[index, begin:end] = window.inputs[row.shared :]
            positions[index, begin:end] = np.arange(row.shared, len(window.inputs))
            branches[index, begin:end] = branch
            scored = np.arange(len(window.inputs) - window.scored, len(window.inputs))
            at.append(index * shape[1] + np.where(scored < row.shared, scored, scored - row.shared + begin))
            targets.append(window.tokens[len(window.tokens) - window.scored :])
            owners.append(np.full(window.scored, number))
    return Batch(tokens, positions, branches, *(np.concatenate(each) for each in (at, targets, owners)))


def read(model: Decoder, batch: Batch) -> Tensor:
    """The decoder's output [rows, length, dim] for a batch."""
    device, stack = next(model.parameters()).device, model.decoder
    tokens, positions, branches = (
        torch.from_numpy(each).to(device) for each in (batch.tokens, batch.positions, batch.branches)
    )
    stack.positions.check_length(int(batch.positions.max()) + 1)
    token_positions = TokenPositions(positions, positions, _mask(batch, positions, branches))
    x = stack.add_positions(model.embedding(tokens), positions)
    real = branches != FILLING if (batch.branches == FILLING).any() else None
    context = make_context(stack.positions, token_positions, stack.product_dtype, real=real)
    return stack.run(x, context).states


def _mask(batch: Batch, positions: Tensor, branches: Tensor) -> Mask:
    """The attention mask. Padding comes last, so that without branches the causal mask is enough to exclude it."""
    if not _has_branches(batch):
        return Mask(causal=True)
    same = branches[:, :, None] == branches[:, None, :]
    ahead = positions[:, None, :] > positions[:, :, None]
    return Mask(values=((same | (branches[:, None, :] == 0)) & ~ahead)[:, None])


def _has_branches(batch: Batch) -> bool:
    """Whether any row has branches."""
    return bool((np.diff(batch.positions) != 1)[batch.branches[:, 1:] != FILLING].any())
