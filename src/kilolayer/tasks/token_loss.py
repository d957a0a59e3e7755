"""The cross-entropy of a batch's tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from kilolayer.data.tokenizer import PAD
from kilolayer.runtime.runtime import runtime_of
from kilolayer.tasks.task import Loss


def token_loss(model: nn.Module, parts: Sequence[Tensor], *, hidden_states: bool, smoothing: float) -> Loss:
    """The loss of a batch; parts: the model's inputs, then labels int64 [rows, length], padding where there is none."""
    *inputs, labels = parts
    output = model(*inputs, hidden_states=hidden_states)
    total, nll = runtime_of(model).token_losses(output.logits, labels, smoothing)
    return Loss(total, nll, (labels != PAD).sum(), output)
