"""Steps of an optimizer on drawn gradients, the same for every model of the same parameters."""

from __future__ import annotations

from typing import Any

import torch


def take_steps(model: torch.nn.Module, step: Any, count: int) -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
        step()
