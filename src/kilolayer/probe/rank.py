"""How many directions the states of a layer fill, and how alike they are: collapsed states tell nothing of their input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kilolayer.layers.block import Block, LayerOutput
from kilolayer.layers.stream import state_of
from kilolayer.models.model import Model
from kilolayer.probe.places import ByLayer, compute, looking
from kilolayer.probe.propagation import Loss


@dataclass(frozen=True)
class StateRank:
    """effective: exp of the entropy of the states' singular values, 1 to the width, over all places of the batch.

    cosine: between two places of the same sequence, the mean over all pairs; 1 where all places have one direction.
    """

    effective: ByLayer
    cosine: ByLayer


def state_rank(model: Model, loss: Loss) -> StateRank:
    """Of the output of each layer."""
    effective: dict[str, list[float]] = {stack.side: [] for stack in model.stacks()}
    cosine: dict[str, list[float]] = {stack.side: [] for stack in model.stacks()}
    with looking(model) as look:
        for stack in look.stacks:

            def note(_block: Block, _inputs: tuple, output: LayerOutput, side: str = stack.side) -> None:
                states = state_of(output.states).detach()
                effective[side].append(effective_rank(look.places(side, states)))
                cosine[side].append(mean_cosine(states, look.real[side]))

            for block in stack.layers():
                look.after(block, note)
        compute(model, loss)
    return StateRank(*({side: tuple(each) for side, each in found.items()} for found in (effective, cosine)))


def effective_rank(states: Tensor) -> float:
    """exp(-sum p log p) with p the singular values of [places, dim], divided by their sum (Roy and Vetterli 2007)."""
    # The eigenvalues of the dim x dim products are their squares, and take no memory for the places.
    states = states.double()
    gram = states.mT @ states
    if not gram.isfinite().all():
        return float("nan")
    values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    shares = values / values.sum()
    return float(torch.special.entr(shares).sum().exp())


def mean_cosine(states_BLD: Tensor, real: Tensor | None) -> float:
    """Over all pairs of places of a sequence, and over the sequences that have a pair; real: bool [batch, length]."""
    directions = torch.nn.functional.normalize(states_BLD.double(), dim=-1)
    if real is not None:
        directions = directions * real[..., None]
    count = torch.full(directions.shape[:1], directions.shape[1]) if real is None else real.sum(dim=1)
    count = count.to(directions)
    # |sum of n unit vectors|^2 is n and twice the sum over pairs.
    pairs = directions.sum(dim=1).square().sum(dim=-1) - directions.square().sum(dim=(1, 2))
    some = count > 1
    return float((pairs[some] / (count * (count - 1))[some]).mean())
