"""The hidden matrices of a model: what maps states to states, and not tokens, labels or experts to states."""

from __future__ import annotations

from torch import Tensor, nn

from kilolayer.layers.projection import Projection
from kilolayer.layers.stack import Stack
from kilolayer.models.adapt.stacks import stacks_of
from kilolayer.moe.experts import ExpertProjection


def hidden_matrices(model: nn.Module) -> dict[Tensor, tuple[int, ...]]:
    """The weights of the projections inside of layers, each with the rows of its separate projections.

    A fused matrix of queries, keys and values is three projections. Shapes: [sum of rows, inputs], and of experts [experts,
    sum of rows, inputs]. Tables, heads and routers are not among them. In models of torch and Transformers, those of the layers
    that `kl.adapt` knows are found; a weight that is stored as [inputs, outputs] is one matrix.
    """
    found: dict[Tensor, tuple[int, ...]] = {}
    for stack in (module for module in model.modules() if isinstance(module, Stack)):
        for layer in stack.layers():
            for module in layer.modules():
                if isinstance(module, Projection | ExpertProjection):
                    found[module.weight] = tuple(module.rows)
                elif isinstance(module, nn.Linear):  # in a user-defined module
                    found[module.weight] = (module.out_features,)
    for stack in stacks_of(model):
        for _, _, sublayer in stack.sublayers():
            for matrix in sublayer.matrices:
                weight = getattr(matrix.owner, matrix.weight)
                parts = 1 if matrix.transposed else matrix.parts
                found[weight] = (weight.shape[0] // parts,) * parts
    return found
