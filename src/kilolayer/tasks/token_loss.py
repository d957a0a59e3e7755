"""The cross-entropy of a batch's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from kilolayer.data.tokenizer import PAD
from kilolayer.runtime.runtime import runtime_of
from kilolayer.tasks.task import Loss


def loss_of_tokens(model: nn.Module, output: Any, labels: Tensor, smoothing: float) -> Loss:
    """The loss of a batch, from what the model made of it; labels: int64 [rows, length], padding where there is none."""
    total, nll = runtime_of(model).token_losses(output.logits, labels, smoothing)
    return Loss(total, nll, (labels != PAD).sum(), output)


def token_loss(model: nn.Module, parts: Sequence[Tensor], *, hidden_states: bool, smoothing: float) -> Loss:
    """The loss of a batch; parts: the model's inputs, then labels."""
    *inputs, labels = parts
    return loss_of_tokens(model, model(*inputs, hidden_states=hidden_states), labels, smoothing)
