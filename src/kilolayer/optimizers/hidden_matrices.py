"""The hidden matrices of a model: what maps states to states, and not tokens, labels or experts to states."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from kilolayer.layers.projection import Projection
from kilolayer.layers.stack import Stack
from kilolayer.models.adapt.stacks import stacks_of
from kilolayer.moe.experts import ExpertProjection


class HiddenMatrix(NamedTuple):
    """The separate projections in a hidden matrix: [sum of rows, inputs], or [inputs, sum of rows] if it is transposed.

    That of experts has one more axis in front. rows: of each projection.
    """

    rows: tuple[int, ...]
    transposed: bool = False


def hidden_matrices(model: nn.Module) -> dict[Tensor, HiddenMatrix]:
    """The weights of the projections inside of layers; a fused matrix of queries, keys and values is three projections.

    Tables, heads and routers are not among them. In models of torch and Transformers, those of the layers that `kl.adapt` knows
    are found.
    """
    found: dict[Tensor, HiddenMatrix] = {}
    for stack in (module for module in model.modules() if isinstance(module, Stack)):
        for layer in stack.layers():
            for module in layer.modules():
                if isinstance(module, Projection | ExpertProjection):
                    found[module.weight] = HiddenMatrix(tuple(module.rows))
                elif isinstance(module, nn.Linear):  # in a user-defined module
                    found[module.weight] = HiddenMatrix((module.out_features,))
    for stack in stacks_of(model):
        for _, _, sublayer in stack.sublayers():
            for matrix in sublayer.matrices:
                weight = getattr(matrix.owner, matrix.weight)
                rows = weight.shape[1 if matrix.transposed else 0] // matrix.parts
                found[weight] = HiddenMatrix((rows,) * matrix.parts, matrix.transposed)
    return found
