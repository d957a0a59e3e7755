"""The gradient's norm, and clipping by it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def clip_gradients(model: nn.Module, largest: float) -> Tensor:
    """The norm of all gradients together, before they are scaled down to `largest`; 0 leaves them as they are."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
    if largest:
        torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm, foreach=True)
    return norm
