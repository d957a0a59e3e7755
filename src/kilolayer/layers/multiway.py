"""Two modalities in one stack, each with its own norms and projections (VLMo, BEiT-3; TorchScale's Multiway network).

    N(x) = [N_A(x_1 .. x_k), N_B(x_{k+1} .. x_L)],    W x = [W_A x_1 .. x_k, W_B x_{k+1} .. x_L]

The first k positions of a sequence are of modality A, the others of B; k is the split. Attention is over the whole sequence.
Scales, shifts and the bias of relative positions are shared.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from kilolayer.layers.norms.base import Norm
from kilolayer.layers.position import LearnedPositions
from kilolayer.layers.projection import Projection

OWN = (Norm, Projection, LearnedPositions)
"""What each modality has of its own."""


class Split:
    """The number of positions of modality A, which the pairs of a block, or those of a stack outside its blocks, look up."""

    position: int = 0


class Multiway(nn.Module):
    """A module for each of two modalities, under TorchScale's names A and B: [..., length, width] to [..., length, rows]."""

    def __init__(self, module: nn.Module, split: Split) -> None:
        super().__init__()
        self.A, self.B = module, copy.deepcopy(module)
        self.split = split

    def forward(self, x: Tensor, *ids: Tensor) -> Tensor:
        """ids: int [1 or batch, length], for a table of positions."""
        k, length = self.split.position, x.shape[-2]
        if k in (0, length):
            return (self.A if k else self.B)(x, *ids)
        first = self.A(x[..., :k, :], *(each[:, :k] for each in ids))
        return torch.cat([first, self.B(x[..., k:, :], *(each[:, k:] for each in ids))], dim=-2)


def each_way(module: nn.Module) -> tuple[nn.Module, ...]:
    """The modules of a pair, or the module itself."""
    return (module.A, module.B) if isinstance(module, Multiway) else (module,)


def parameters_of_others(model: nn.Module) -> int:
    """The number of parameters that a position does not use because they belong to the other modality."""
    return sum(weight.numel() for pair in model.modules() if isinstance(pair, Multiway) for weight in pair.B.parameters())


def pair_modules(module: nn.Module, split: Split) -> Split:
    """Replace every norm, projection and table of positions inside `module` by a pair, unless it is in one; returns `split`."""
    for name, child in module.named_children():
        if isinstance(child, OWN):
            setattr(module, name, Multiway(child, split))
        elif not isinstance(child, Multiway):
            pair_modules(child, split)
    return split
