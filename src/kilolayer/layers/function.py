"""What the functions of dense sublayers have in common: they end in a projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from kilolayer.layers.projection import Projection


class Function(nn.Module):
    """W_o hidden(x): attention, or the feed-forward network. [batch, length, dim] to the same."""

    hidden: Callable[..., Tensor]
    """What the output projection reads, from the same arguments as `forward`."""
    output: Projection

    def forward(self, x: Tensor, *seen: Any, biased: bool = True) -> Tensor:
        """`seen` is what the function takes besides its input; with `biased=False` the output's bias is the caller's."""
        return self.output(self.hidden(x, *seen), biased=biased)
