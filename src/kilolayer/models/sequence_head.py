"""BERT's pooler and classifier: from the states of a sequence to its scores."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kilolayer.layers.projection import PreciseProjection
from kilolayer.models.head import Head
from kilolayer.recipes.base import Plan, Role


class SequenceHead(nn.Module):
    """scores = W_2 dropout(tanh(W_1 pooled + b_1)) + b_2 (Devlin et al. 2019), both matrices Xavier's at the start.

    It stays precise in a model that is lowered: it costs next to nothing, and numbers from 0 to 5 lie 1/32 apart in bf16.
    """

    def __init__(self, dim: int, config: Head) -> None:
        super().__init__()
        self.pool = config.pool
        self.dense = PreciseProjection(dim, [(Role.HEAD, dim)], Plan())
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.output = PreciseProjection(dim, [(Role.HEAD, config.outputs)], Plan())

    def forward(self, states: Tensor, real: Tensor | None) -> Tensor:
        """[batch, length, dim] and bool [batch, length], True where there is no padding, to [batch, outputs]."""
        return self.output(self.dropout(torch.tanh(self.dense(self._pooled(states, real)))))

    def _pooled(self, states_BLD: Tensor, real: Tensor | None) -> Tensor:
        if self.pool == "first":
            return states_BLD[:, 0]
        if real is None:
            return states_BLD.mean(dim=1, dtype=self.dense.weight.dtype)
        weights_BL1 = real.to(self.dense.weight.dtype)[..., None]
        # Rows that only fill up a batch have no position that counts.
        return (states_BLD * weights_BL1).sum(dim=1) / weights_BL1.sum(dim=1).clamp(min=1)
