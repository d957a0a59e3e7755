"""Models that cost the same to train: how many steps, or what width, make one as dear as another."""

from __future__ import annotations

import functools
from dataclasses import replace

from kilolayer.errors import InputError
from kilolayer.models.config import ModelConfig
from kilolayer.speed.budget import Work, forward_flops


def training_flops(config: ModelConfig, work: Work, steps: int = 1) -> float:
    """FLOPs of matrix products in `steps` steps of training on batches of `work`."""
    return 3 * forward_flops(config, work) * steps  # the backward pass multiplies each matrix twice


def steps_of_equal_flops(config: ModelConfig, like: ModelConfig, work: Work, steps: int) -> int:
    """How many steps of `config` cost as much as `steps` of the model `like`, on the same batches; at least 1."""
    return max(1, round(steps * training_flops(like, work) / training_flops(config, work)))


def width_of_equal_flops(config: ModelConfig, like: ModelConfig, work: Work) -> ModelConfig:
    """`config` in the width at which a step of it costs as much as one of the model `like`, as nearly as widths allow.

    Its dim is a multiple of twice its heads, whose number stays; ffn_dim keeps its ratio to dim.
    """
    wanted = training_flops(like, work)

    def at(units: int) -> ModelConfig:
        dim = 2 * config.heads * units
        return replace(config, dim=dim, ffn_dim=max(1, round(dim * config.ffn_dim / config.dim)))

    @functools.cache
    def excess(units: int) -> float:
        return training_flops(at(units), work) - wanted

    if excess(1) > 0:
        raise InputError(
            f"in its smallest width, {at(1).dim}, the model costs more than the other",
            fix="give it fewer layers or fewer heads",
        )
    low, high = 1, 2
    while excess(high) < 0:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if excess(middle) <= 0 else (low, middle)
    return at(min(low, high, key=lambda units: abs(excess(units))))
