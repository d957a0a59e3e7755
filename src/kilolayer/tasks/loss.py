"""The loss of a batch's tokens."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kilolayer.data.tokenizer import PAD


def token_losses(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The smoothed loss and the negative log-likelihood, each summed over all labels that are not padding.

    logits [batch, length, vocabulary]; labels int64 [batch, length]. The smoothed target has 1 - smoothing on the label and the
    rest spread evenly over the vocabulary.
    """
    log_probabilities = F.log_softmax(logits.float(), dim=-1)
    real = labels != PAD
    nll = -log_probabilities.gather(-1, labels[..., None])[..., 0].masked_fill(~real, 0.0).sum()
    if not smoothing:
        return nll, nll
    spread = -log_probabilities.mean(dim=-1).masked_fill(~real, 0.0).sum()
    return (1 - smoothing) * nll + smoothing * spread, nll
