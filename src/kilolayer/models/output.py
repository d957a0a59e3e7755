"""Optional modules around the output table: BERT's transform of the states, and a bias on the logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kilolayer.layers.feedforward import ACTIVATIONS
from kilolayer.layers.initialize import KeyedGenerator
from kilolayer.layers.norms.base import make_norm
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.projection import Projection
from kilolayer.recipes.base import NORM, Plan
from kilolayer.recipes.role import Role

NEVER = -1e4
"""The logit of a token that is never predicted: its probability is 0 in every dtype, and fp16 can represent it."""


class OutputTransform(nn.Module):
    """norm(phi(W x + b)) before the output table of a masked language model (Devlin et al. 2019); W [dim, dim], Xavier."""

    def __init__(self, options: LayerOptions) -> None:
        super().__init__()
        self.dense = Projection(options.dim, [(Role.HEAD, options.dim)], Plan())
        self.activation = ACTIVATIONS[options.activation]()
        self.norm = make_norm(NORM, options.dim, options)

    def forward(self, states: Tensor) -> Tensor:
        """[batch, length, dim] to the same shape."""
        return self.norm(self.activation(self.dense(states)))


class ScoreBias(nn.Module):
    """A learned bias on the logits, [vocabulary], initialized to 0."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size))

    def reset_parameters(self, generator: KeyedGenerator | None = None) -> None:
        self.weight.zero_()

    def forward(self, scores: Tensor) -> Tensor:
        """[..., vocabulary] to the same shape and dtype."""
        return scores + self.weight.to(scores.dtype)
