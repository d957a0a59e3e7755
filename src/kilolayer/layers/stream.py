"""How the state travels from layer to layer of a stack."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kilolayer.layers.initialise import Noise
from kilolayer.layers.norm import make_norm
from kilolayer.layers.options import LayerOptions
from kilolayer.recipes.base import Combination


class Latest(nn.Module):
    """Each layer reads the output of the layer below it."""

    def write(self, history: list[Tensor], y: Tensor) -> list[Tensor]:
        return [y]

    def read(self, history: list[Tensor]) -> Tensor:
        return history[-1]


class LayerCombination(nn.Module):
    """DLCL: each layer, and what stands above the last, reads a learned combination of all outputs below it.

    `normalise="each"`: sum_k W[l,k] LN_k(y_k), the embedding y_0 not normalised;
    "sum": LN(sum_k W[l,k] y_k), except for the first layer, which reads W[0,0] y_0.
    """

    def __init__(
        self,
        combination: Combination,
        layers: int,
        options: LayerOptions,
    ) -> None:
        super().__init__()
        self.normalises_each = combination.normalise == "each"
        self.weight = nn.Parameter(torch.empty(layers + 1, layers + 1))
        self.norms = nn.ModuleList(make_norm(True, options.dim, options) for _ in range(layers))

    def fill(self, noise: Noise) -> None:
        rows = torch.arange(1, len(self.weight) + 1, device=self.weight.device, dtype=self.weight.dtype)
        self.weight.copy_(torch.ones_like(self.weight).tril() / rows[:, None])

    def write(self, history: list[Tensor], y: Tensor) -> list[Tensor]:
        """The outputs so far with a new one; the first is the embedding."""
        return [*history, self.norms[len(history) - 1](y) if self.normalises_each and history else y]

    def read(self, history: list[Tensor]) -> Tensor:
        """What the next layer reads: [batch, length, dim]."""
        count = len(history)
        weights = self.weight[count - 1, :count].unbind()
        # Term by term: the outputs are kept once, where a stacked product would keep a copy of them for every layer.
        combined = weights[0] * history[0]
        for weight, output in zip(weights[1:], history[1:], strict=True):
            combined = torch.addcmul(combined, weight, output)
        return combined if self.normalises_each or count == 1 else self.norms[count - 2](combined)


def make_stream(
    combination: Combination | None,
    layers: int,
    options: LayerOptions,
) -> Latest | LayerCombination:
    """The stream that a recipe asks for."""
    return Latest() if combination is None else LayerCombination(combination, layers, options)
