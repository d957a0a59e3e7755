"""The statistics of each row of logits that a loss over the vocabulary needs: one pass forward and one backward on a GPU.

No other tensor of the logits' size is allocated: they keep the precision of the product that wrote them, and the backward pass
overwrites them with their gradient. On the CPU the same function runs plain formulas, which the kernels are tested against.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kilolayer.speed.operators import kernels


def can_fuse_score_statistics(device: torch.device) -> bool:
    """Whether the kernels run on this device."""
    return kernels.runs_on(device, "loss")


def score_statistics(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logsumexp of each row, the logit of its label, and the mean of the row: fp32 [rows] each.

    scores: [rows, vocabulary], contiguous; the backward pass overwrites them with their gradient. labels: int64 [rows].
    """
    return _ScoreStatistics.apply(scores, labels)


class _ScoreStatistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total, chosen, mean = _measured(scores, labels)
        ctx.save_for_backward(scores, labels, total)
        return total, chosen, mean

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        scores, labels, total = ctx.saved_tensors
        of_total, of_chosen, of_mean = (each.contiguous() for each in grad_outputs)
        if scores.is_cuda:
            from kilolayer.speed.operators.score_statistics_kernel import spread_gradients

            spread_gradients(scores, labels, total, of_total, of_chosen, of_mean)
            torch.autograd.graph.increment_version(scores)
        else:
            found = (scores.float() - total[:, None]).exp() * of_total[:, None] + of_mean[:, None] / scores.shape[1]
            scores.copy_(found.scatter_add(1, labels[:, None], of_chosen[:, None]))
        return scores, None


def _measured(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not scores.is_cuda:
        precise = scores.float()
        return precise.logsumexp(dim=1), precise.gather(1, labels[:, None])[:, 0], precise.mean(dim=1)
    from kilolayer.speed.operators.score_statistics_kernel import measure_rows

    total, chosen, mean = (scores.new_empty(len(scores), dtype=torch.float32) for _ in range(3))
    measure_rows(scores, labels, total, chosen, mean)
    return total, chosen, mean
