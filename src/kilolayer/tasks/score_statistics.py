"""What a loss over the vocabulary needs of each row of scores, in one pass forward and one backward on a GPU.

Scores stay in the precision that the product wrote them in: nothing of their size is ever held in fp32. On the CPU the same
operators run plain formulas, which the kernels are tested against.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kilolayer.layers import kernels


def serves(device: torch.device) -> bool:
    """Whether the kernels can run here."""
    return kernels.run_on(device)


@torch.library.custom_op("kilolayer::score_statistics", mutates_args=(), device_types="cuda")
def score_statistics(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logsumexp of each row, the score of its label, and the row's mean: fp32 [rows] each.

    scores [rows, vocabulary], contiguous; labels int64 [rows].
    """
    from kilolayer.tasks.score_statistics_kernel import measure_rows

    rows = len(scores)
    total, chosen, mean = (scores.new_empty(rows, dtype=torch.float32) for _ in range(3))
    measure_rows(scores, labels, total, chosen, mean)
    return total, chosen, mean


@torch.library.custom_op("kilolayer::score_statistics_backward", mutates_args=(), device_types="cuda")
def score_statistics_backward(
    scores: Tensor, labels: Tensor, total: Tensor, of_total: Tensor, of_chosen: Tensor, of_mean: Tensor
) -> Tensor:
    """The gradient of the scores from those of the three statistics, fp32 [rows] each."""
    from kilolayer.tasks.score_statistics_kernel import spread_gradients

    found = torch.empty_like(scores)
    spread_gradients(scores, labels, total, of_total, of_chosen, of_mean, found)
    return found


@score_statistics.register_kernel("cpu")
def _(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    precise = scores.float()
    return precise.logsumexp(dim=1), precise.gather(1, labels[:, None])[:, 0], precise.mean(dim=1)


@score_statistics_backward.register_kernel("cpu")
def _(scores: Tensor, labels: Tensor, total: Tensor, of_total: Tensor, of_chosen: Tensor, of_mean: Tensor) -> Tensor:
    found = (scores.float() - total[:, None]).exp() * of_total[:, None] + of_mean[:, None] / scores.shape[1]
    return found.scatter_add(1, labels[:, None], of_chosen[:, None]).to(scores.dtype)


@score_statistics.register_fake
def _(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total, chosen, mean = (scores.new_empty(scores.shape[0], dtype=torch.float32) for _ in range(3))
    return total, chosen, mean


@score_statistics_backward.register_fake
def _(scores: Tensor, labels: Tensor, total: Tensor, of_total: Tensor, of_chosen: Tensor, of_mean: Tensor) -> Tensor:
    return torch.empty_like(scores)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[0])


def _backward(ctx: Any, of_total: Tensor, of_chosen: Tensor, of_mean: Tensor) -> tuple[Tensor, None]:
    scores, labels, total = ctx.saved_tensors
    gradients = (each.contiguous() for each in (of_total, of_chosen, of_mean))
    return score_statistics_backward(scores, labels, total, *gradients), None


score_statistics.register_autograd(_backward, setup_context=_keep)
