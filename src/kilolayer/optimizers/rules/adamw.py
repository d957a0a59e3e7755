"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kilolayer.optimizers.registry import register
from kilolayer.optimizers.rules.adam import Adam


@register
@dataclass(frozen=True)
class AdamW(Adam):
    """w <- (1 - lr decay) w - step * mean / (root * sqrt(square) + offset), with Adam's numbers."""

    name: ClassVar[str] = "adamw"
    decoupled: ClassVar[bool] = True
