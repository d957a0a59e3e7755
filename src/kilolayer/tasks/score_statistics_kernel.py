"""The kernels of score_statistics.py."""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 4096
WARPS = 8


def measure_rows(scores: Tensor, labels: Tensor, total: Tensor, chosen: Tensor, mean: Tensor) -> None:
    """Write logsumexp, label's score and mean of each row; scores [rows, vocabulary], the others [rows], all contiguous."""
    rows, width = scores.shape
    _measure_rows[(rows,)](scores, labels, total, chosen, mean, WIDTH=width, COLUMNS=COLUMNS, num_warps=WARPS)


def spread_gradients(
    scores: Tensor, labels: Tensor, total: Tensor, of_total: Tensor, of_chosen: Tensor, of_mean: Tensor
) -> None:
    """Put softmax * of_total + of_mean / vocabulary, and of_chosen more at the label, in the place of the scores."""
    rows, width = scores.shape
    _spread_gradients[(rows, triton.cdiv(width, COLUMNS))](
        scores, labels, total, of_total, of_chosen, of_mean, WIDTH=width, COLUMNS=COLUMNS, num_warps=WARPS
    )


@triton.jit
def _measure_rows(scores_at, labels_at, total_at, chosen_at, mean_at, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    scores_at += row * WIDTH
    highest = tl.full([COLUMNS], float("-inf"), dtype=tl.float32)
    powers = tl.zeros([COLUMNS], dtype=tl.float32)
    sums = tl.zeros([COLUMNS], dtype=tl.float32)
    # Each lane keeps its own maximum, so that the row is summed over lanes once and not in every block.
    for start in range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < WIDTH
        scores = tl.load(scores_at + column, mask=inside, other=float("-inf")).to(tl.float32)
        sums += tl.where(inside, scores, 0.0)
        higher = tl.maximum(highest, scores)
        reached = tl.where(higher == float("-inf"), 0.0, higher)
        powers = powers * tl.exp(highest - reached) + tl.exp(scores - reached)
        highest = higher
    top = tl.max(highest, axis=0)
    reached = tl.where(top == float("-inf"), 0.0, top)
    tl.store(total_at + row, tl.log(tl.sum(powers * tl.exp(highest - reached), axis=0)) + reached)
    tl.store(chosen_at + row, tl.load(scores_at + tl.load(labels_at + row)).to(tl.float32))
    tl.store(mean_at + row, tl.sum(sums, axis=0) / WIDTH)


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
