"""Triton kernels for score_statistics.py."""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 4096
WARPS = 8
VECTOR: tl.constexpr = tl.constexpr(8)
"""Logits that a thread reads at once; they share a running maximum, so that there is little more than one exp per logit."""


def measure_rows(scores: Tensor, labels: Tensor, total: Tensor, chosen: Tensor, mean: Tensor) -> None:
    """Write logsumexp, the label's logit and the mean of each row. scores: [rows, vocabulary]; others [rows]; contiguous."""
    rows, width = scores.shape
    _measure_rows[(rows,)](scores, labels, total, chosen, mean, WIDTH=width, COLUMNS=COLUMNS, num_warps=WARPS)


def spread_gradients(
    scores: Tensor, labels: Tensor, total: Tensor, of_total: Tensor, of_chosen: Tensor, of_mean: Tensor
) -> None:
    """Overwrite the scores with their gradient: softmax * of_total + of_mean / vocabulary, plus of_chosen at the label."""
    rows, width = scores.shape
    _spread_gradients[(rows, triton.cdiv(width, COLUMNS))](
        scores, labels, total, of_total, of_chosen, of_mean, WIDTH=width, COLUMNS=COLUMNS, num_warps=WARPS
    )


@triton.jit
def _measure_rows(scores_at, labels_at, total_at, chosen_at, mean_at, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    scores_at += row * WIDTH
    column = tl.arange(0, COLUMNS)
    # Every few scores have their own maximum, so that the row is summed over threads once and not in every block.
    highest = tl.full([COLUMNS // VECTOR], float("-inf"), dtype=tl.float32)
    powers = tl.zeros([COLUMNS // VECTOR], dtype=tl.float32)
    sums = tl.zeros([COLUMNS // VECTOR], dtype=tl.float32)
    for start in range(0, WIDTH - COLUMNS + 1, COLUMNS):
        scores = _in_vectors(tl.load(scores_at + start + column), COLUMNS)
        highest, powers = _add_powers(scores, highest, powers)
        sums += tl.sum(scores, axis=1)
    if WIDTH % COLUMNS != 0:
        column += WIDTH // COLUMNS * COLUMNS
        inside = column < WIDTH
        scores = _in_vectors(tl.load(scores_at + column, mask=inside, other=float("-inf")), COLUMNS)
        highest, powers = _add_powers(scores, highest, powers)
        sums += tl.sum(tl.where(tl.reshape(inside, [COLUMNS // VECTOR, VECTOR]), scores, 0.0), axis=1)
    top = tl.max(highest, axis=0)
    reached = tl.where(top == float("-inf"), 0.0, top)
    tl.store(total_at + row, tl.log(tl.sum(powers * tl.exp(highest - reached), axis=0)) + reached)
    tl.store(chosen_at + row, tl.load(scores_at + tl.load(labels_at + row)).to(tl.float32))
    tl.store(mean_at + row, tl.sum(sums, axis=0) / WIDTH)


@triton.jit
def _in_vectors(scores, COLUMNS: tl.constexpr):
    return tl.reshape(scores.to(tl.float32), [COLUMNS // VECTOR, VECTOR])


@triton.jit
def _add_powers(scores, highest, powers):
    """The maxima with these scores, and the sums of exp(score - maximum)."""
    higher = tl.maximum(highest, tl.max(scores, axis=1))
    reached = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, powers * tl.exp(highest - reached) + tl.sum(tl.exp(scores - reached[:, None]), axis=1)


@triton.jit
def _spread_gradients(
    scores_at,
    labels_at,
    total_at,
    of_total_at,
    of_chosen_at,
    of_mean_at,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    scores_at += row * WIDTH + column
    scores = tl.load(scores_at, mask=inside, other=0.0).to(tl.float32)
    found = tl.exp(scores - tl.load(total_at + row)) * tl.load(of_total_at + row) + tl.load(of_mean_at + row) / WIDTH
    found += tl.where(column == tl.load(labels_at + row), tl.load(of_chosen_at + row), 0.0)
    tl.store(scores_at, found.to(scores_at.dtype.element_ty), mask=inside)
