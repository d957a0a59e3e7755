"""The effective rank of each layer's states, and their cosine similarity: collapsed states carry little information."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kilolayer.layers.block import Block
from kilolayer.layers.stream import LayerOutput, state_of
from kilolayer.models.model import Model
from kilolayer.probe.hooks import ByLayer, compute, forward_hooks
from kilolayer.probe.propagation import Loss


@dataclass(frozen=True)
class StateRank:
    """effective: the effective rank, from 1 to the width, over all positions of the batch.

    cosine: the mean cosine between two positions of the same sequence; 1 if all have the same direction.
    """

    effective: ByLayer
    cosine: ByLayer


def state_rank(model: Model, loss: Loss) -> StateRank:
    """Measure the output of each layer, by stack."""
    effective: dict[str, list[float]] = {stack.side: [] for stack in model.stacks()}
    cosine: dict[str, list[float]] = {stack.side: [] for stack in model.stacks()}
    with forward_hooks(model) as hooks:
        for stack in hooks.stacks:

            def record(_block: Block, _inputs: tuple, output: LayerOutput, side: str = stack.side) -> None:
                states = state_of(output.states).detach()
                effective[side].append(effective_rank(hooks.real_positions(side, states)))
                cosine[side].append(mean_cosine(states, hooks.real[side]))

            for block in stack.layers():
                hooks.after(block, record)
        compute(model, loss)
    return StateRank(*({side: tuple(each) for side, each in found.items()} for found in (effective, cosine)))


def effective_rank(states: Tensor) -> float:
    """exp(-sum p log p) with p the singular values of [positions, dim], divided by their sum (Roy and Vetterli 2007)."""
    # The eigenvalues of the [dim, dim] Gram matrix are the squared singular values; this saves memory for many positions.
    states = states.double()
    gram = states.mT @ states
    if not gram.isfinite().all():
        return float("nan")
    values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    shares = values / values.sum()
    return float(torch.special.entr(shares).sum().exp())


def mean_cosine(states_BLD: Tensor, real: Tensor | None) -> float:
    """The mean cosine over all pairs of positions in a sequence, averaged over sequences; real: bool [batch, length]."""
    directions = torch.nn.functional.normalize(states_BLD.double(), dim=-1)
    if real is not None:
        directions = directions * real[..., None]
    count = torch.full(directions.shape[:1], directions.shape[1]) if real is None else real.sum(dim=1)
    count = count.to(directions)
    # |sum of n unit vectors|^2 = n + 2 * (sum of cosines over pairs).
    pairs = directions.sum(dim=1).square().sum(dim=-1) - directions.square().sum(dim=(1, 2))
    some = count > 1
    return float((pairs[some] / (count * (count - 1))[some]).mean())
