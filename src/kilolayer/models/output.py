"""What stands between the states of a model and the scores of its vocabulary, besides the table."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kilolayer.layers.feedforward import ACTIVATIONS
from kilolayer.layers.initialise import Noise
from kilolayer.layers.norm import make_norm
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.projection import Projection
from kilolayer.recipes.base import Plan, Role

NEVER = -1e4
"""The score of a token that is never predicted: its probability is 0 in every precision, and fp16 holds the number."""


class OutputTransform(nn.Module):
    """norm(phi(W x + b)), before a masked language model's scores (Devlin et al. 2019); W is Xavier's at the start."""

    def __init__(self, options: LayerOptions) -> None:
        super().__init__()
        self.dense = Projection(options.dim, [(Role.HEAD, options.dim)], Plan())
        self.activation = ACTIVATIONS[options.activation]()
        self.norm = make_norm(True, options.dim, options)

    def forward(self, states: Tensor) -> Tensor:
        """[batch, length, dim] to the same."""
        return self.norm(self.activation(self.dense(states)))


class ScoreBias(nn.Module):
    """A number for each token of the vocabulary, 0 at the start."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size))

    def fill(self, noise: Noise) -> None:
        self.weight.zero_()

    def forward(self, scores: Tensor) -> Tensor:
        """[..., vocabulary] to the same, in its dtype."""
        return scores + self.weight.to(scores.dtype)
