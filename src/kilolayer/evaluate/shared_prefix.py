"""Sequences that begin alike, laid out so that their common beginning is read once.

A row holds the beginning that its sequences share, and behind it the rest of each, its branches, side by side. A branch sees
the beginning and itself, and its positions go on from the beginning's:

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

from kilolayer.layers.mask import Mask
from kilolayer.layers.stack import Stack
from kilolayer.layers.view import Placed, make_view
from kilolayer.models.decoder import Decoder
from kilolayer.speed.written import WrittenStack

LONGEST_ROW = 2048
"""Tokens of a row with branches: every position of a row is compared with all others."""
LEAST_SHARED = 0.25
"""Of a sequence's tokens; to share less is not worth a longer row."""
FILLING = -1


@dataclass(frozen=True)
class Window:
    """Tokens [n] that fit into the model's context and one more; the last `scored` of them are predicted."""

    tokens: np.ndarray
    scored: int

    @property
    def inputs(self) -> np.ndarray:
        """What the model reads: the last token is only predicted."""
        return self.tokens[:-1]


@dataclass(frozen=True)
class Row:
    """Windows, by their numbers, whose inputs share the first `shared` tokens."""

    numbers: list[int]
    shared: int
    length: int
    """Tokens of the row: the shared ones and all branches."""


@dataclass(frozen=True)
class Batch:
    """Rows as arrays [rows, length] of tokens, positions and branches, and what is predicted where.

    at: int [predictions], the place in the flattened rows from which the token `targets` of the window `windows` is predicted.
    """

    tokens: np.ndarray
    positions: np.ndarray
    branches: np.ndarray
    at: np.ndarray
    targets: np.ndarray
    windows: np.ndarray


def share(windows: Sequence[Window]) -> list[Row]:
    """The rows that read all windows with the fewest tokens, as far as neighbours in the order of their tokens tell."""
    # As big-endian bytes, sequences of tokens are in the order of their tokens.
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
    """The row with one window more, that has `common` tokens in common with the last one; None where it gains nothing.

    In their order, what all have in common is the least that two neighbours have.
    """
    count, shared = len(row.numbers), min(row.shared, common)
    longer = row.length + (count - 1) * row.shared - count * shared + length
    if longer >= row.length + length or longer > LONGEST_ROW or shared < LEAST_SHARED * length:
        return None
    return Row([*row.numbers, number], shared, longer)


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """How many tokens two sequences share from their beginning on."""
    length = min(len(first), len(second))
    differ = first[:length] != second[:length]
    return int(differ.argmax()) if differ.any() else length


def batches(windows: Sequence[Window], rows: Sequence[Row], most: int) -> Iterator[Batch]:
    """Rows of like length together, the longest first, at most `most` tokens with their filling (or a single row)."""
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
            places = np.arange(len(window.inputs) - window.scored, len(window.inputs))
            at.append(index * shape[1] + np.where(places < row.shared, places, places - row.shared + begin))
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
    placed = Placed(positions, positions, _mask(batch, positions, branches))
    x = stack.enter(model.embedding(tokens), positions)
    real = branches != FILLING if (batch.branches == FILLING).any() else None
    view = make_view(stack.positions, placed, stack.product_dtype, real=real)
    # Fast stacks make views of their own, which know no branches: of them the plain layers run.
    out = stack.run(x, view) if isinstance(stack, WrittenStack) else Stack.run(stack, x, view)
    return out.states


def _mask(batch: Batch, positions: Tensor, branches: Tensor) -> Mask:
    """Who looks where. Filling stands behind everything else, so that without branches the causal mask alone keeps it out."""
    if not _has_branches(batch):
        return Mask(causal=True)
    same = branches[:, :, None] == branches[:, None, :]
    ahead = positions[:, None, :] > positions[:, :, None]
    return Mask(values=((same | (branches[:, None, :] == 0)) & ~ahead)[:, None])


def _has_branches(batch: Batch) -> bool:
    """Whether a row is more than one line of tokens."""
    return bool((np.diff(batch.positions) != 1)[batch.branches[:, 1:] != FILLING].any())
