"""BERT's pooler and classifier: one vector of scores for a whole sequence."""

from __future__ import annotations

from torch import Tensor, nn

from kilolayer.layers.norms.base import make_norm
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.projection import PreciseProjection
from kilolayer.models.head import Head
from kilolayer.recipes.base import NORM, Plan
from kilolayer.recipes.role import Role


class SequenceHead(nn.Module):
    """scores = W_2 dropout(tanh(W_1 pooled + b_1)) + b_2 (Devlin et al. 2019): [batch, length, dim] to [batch, outputs].

    With `pooler="none"`, scores = W_2 dropout(pooled) + b_2; with "norm", of norm(pooled).
    first: where the positions begin of which a mean is taken.

    W_1 [dim, dim] and W_2 [outputs, dim] have Xavier initialization. `Model.cast_weights` leaves the head in full precision: it
    costs almost nothing, and in bf16 predicted numbers between 4 and 8 would be 1/32 apart.
    """

    def __init__(self, options: LayerOptions, config: Head, first: int = 0) -> None:
        super().__init__()
        self.pool, self.first = config.pool, first
        dim, is_bert = options.dim, config.pooler == "tanh"
        self.norm = make_norm(NORM if config.pooler == "norm" else None, dim, options)
        self.dense = PreciseProjection(dim, [(Role.HEAD, dim)], Plan()) if is_bert else nn.Identity()
        self.activation = nn.Tanh() if is_bert else nn.Identity()
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.output = PreciseProjection(dim, [(Role.HEAD, config.outputs)], Plan())

    def forward(self, states: Tensor, real: Tensor | None) -> Tensor:
        """states [batch, length, dim] to scores [batch, outputs]; real: bool [batch, length], False at padding."""
        pooled = self.norm(self._pooled(states, real))
        return self.output(self.dropout(self.activation(self.dense(pooled))))

    def _pooled(self, states_BLD: Tensor, real: Tensor | None) -> Tensor:
        if self.pool == "first":
            return states_BLD[:, 0]
        if real is None:
            return states_BLD[:, self.first :].mean(dim=1, dtype=self.output.weight.dtype)
        weights_BL1 = real.to(self.output.weight.dtype)[..., None]
        # Rows that only fill up a batch have no real positions; clamp avoids a division by 0.
        return (states_BLD * weights_BL1).sum(dim=1) / weights_BL1.sum(dim=1).clamp(min=1)
