"""The cross-entropy of a batch's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from kilolayer.data.tokenizer import PAD
from kilolayer.operators.score_statistics import can_fuse_score_statistics, score_statistics
from kilolayer.tasks.task import Loss


def token_loss(model: nn.Module, parts: Sequence[Tensor], *, hidden_states: bool, smoothing: float) -> Loss:
    """The loss of a batch; parts: the model's inputs, then labels int64 [rows, length], padding where there is none."""
    *inputs, labels = parts
    output = model(*inputs, hidden_states=hidden_states)
    total, nll = token_losses(output.logits, labels, smoothing)
    return Loss(total, nll, (labels != PAD).sum(), output)


def token_losses(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The smoothed loss and the negative log-likelihood, each summed over all labels that are not padding.

    logits [batch, length, vocabulary]; labels int64 [batch, length]. The smoothed target has 1 - smoothing on the label and the
    rest spread evenly over the vocabulary. On a GPU the backward pass overwrites the logits with their gradient.
    """
    logits, labels = logits.flatten(0, 1), labels.flatten()
    if can_fuse_score_statistics(logits.device):
        total, chosen, mean = score_statistics(logits.contiguous(), labels)
        nll, spread = total - chosen, total - mean
    else:
        log_probabilities = F.log_softmax(logits.float(), dim=-1)
        nll = F.nll_loss(log_probabilities, labels, reduction="none")
        spread = -log_probabilities.mean(dim=-1) if smoothing else nll
    nll, spread = (each.masked_fill(labels == PAD, 0.0).sum() for each in (nll, spread))
    return ((1 - smoothing) * nll + smoothing * spread if smoothing else nll), nll
