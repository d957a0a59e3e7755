"""RAdam: Adam whose step is rectified for the variance of the first updates (Liu et al., arXiv:1908.03265)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kilolayer.optimizers.registry import register
from kilolayer.optimizers.rules.adam import Adam


@register
@dataclass(frozen=True)
class RAdam(Adam):
    """Adam's update times the rectification term, without the denominator until that is defined.

    Weight decay is decoupled, as in its authors' code.
    """

    decoupled: ClassVar[bool] = True

    def numbers(self, lr: Tensor, count: Tensor) -> Tensor:
        """lr, step, root and offset."""
        beta1, beta2, eps = self.beta1, self.beta2, self.eps
        left1, left2 = 1 - beta1**count, 1 - beta2**count
        longest = 2 / (1 - beta2) - 1
        length = longest - 2 * count * beta2**count / left2
        rectified = length > 5
        ratio = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        step = lr / left1 * torch.where(rectified, (ratio.clamp(min=0) * left2).sqrt(), 1.0)
        return torch.stack([lr, step, rectified.double(), torch.where(rectified, eps, 1.0)])
