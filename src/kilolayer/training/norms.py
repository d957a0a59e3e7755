"""Measures each layer during a step: the norms of its gradient and its update, and the residual stream after it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kilolayer.models.model import Model
from kilolayer.models.outputs import DecoderOutput, EncoderDecoderOutput, EncoderOutput
from kilolayer.optimizers.optimizer import Optimizer

ByLayer = dict[str, list[float]]


@dataclass
class LayerNorms:
    """Norms by stack and layer: of the gradient and the update of a layer's weights, and the residual stream's RMS."""

    gradient: ByLayer = field(default_factory=dict)
    update: ByLayer = field(default_factory=dict)
    residual: ByLayer = field(default_factory=dict)

    def rounded(self) -> dict[str, ByLayer]:
        """All norms by name, rounded to six digits, which halves their size in a file."""
        return {
            name: {side: [float(f"{norm:.6g}") for norm in norms] for side, norms in stacks.items()}
            for name, stacks in vars(self).items()
        }


class Meter:
    """Measures layers during a step without reading from the device, so that the step can be captured in a CUDA graph.

    `found` [3, layers + 1]: squared gradient norms, squared update norms, and the residual stream's RMS summed over batches.
    The layers of all stacks follow one another; the last column collects what belongs to no layer.
    """

    def __init__(self, model: Model, optimizer: Optimizer) -> None:
        self.stacks, self.optimizer = model.stacks(), optimizer
        layers = sum(len(stack.blocks) for stack in self.stacks)
        self.found = torch.zeros(3, layers + 1, dtype=torch.float64, device=optimizer.device)
        self.columns = columns_of(model, optimizer)

    def record_residuals(self, out: EncoderOutput | DecoderOutput | EncoderDecoderOutput) -> None:
        """Add the residual stream of a forward pass that returned hidden states."""
        encoder = out.encoder_hidden_states if isinstance(out, EncoderDecoderOutput) else None
        states = [*(encoder or ())[1:], *(out.hidden_states or ())[1:]]
        self.residuals[:-1] += torch.stack([state.detach().double().square().mean().sqrt() for state in states])

    @property
    def residuals(self) -> Tensor:
        """The sums of `record_residuals` so far: [layers + 1]."""
        return self.found[2]

    def record_gradients(self) -> None:
        """Measure the gradients; call it before the update."""
        self._accumulate(0, self.optimizer.gradient_norms())

    def record_update(self, norms: list[Tensor]) -> None:
        """Add the norms of an update, as `Optimizer.update` returned them."""
        self._accumulate(1, norms)

    def read(self, norms: LayerNorms, batches: int, scale: float) -> None:
        """Move the measurements into `norms` and reset them; the gradients were `scale` times too large."""
        gradient, update, residual = self.found.tolist()
        self.found.zero_()
        norms.gradient = self._by_stack([value**0.5 / scale for value in gradient])
        norms.update = self._by_stack([value**0.5 for value in update])
        norms.residual = self._by_stack([value / batches for value in residual])

    def _accumulate(self, row: int, norms: list[Tensor]) -> None:
        for columns, each in zip(self.columns, norms, strict=True):
            self.found[row].index_add_(0, columns, each.double().square())

    def _by_stack(self, values: list[float]) -> ByLayer:
        rest = iter(values)
        return {stack.side: [next(rest) for _ in stack.blocks] for stack in self.stacks}


def columns_of(model: Model, optimizer: Optimizer) -> list[Tensor]:
    """The column of each weight's layer, group by group: int64 [weights of the group].

    The layers of all stacks are numbered consecutively; one more column follows for weights that belong to no layer.
    """
    stacks = model.stacks()
    starts = {stack.side: sum(len(other.blocks) for other in stacks[:index]) for index, stack in enumerate(stacks)}
    layers = sum(len(stack.blocks) for stack in stacks)

    def column(name: str) -> int:
        side, *path = name.split(".")
        return starts[side] + int(path[1]) if path[0] == "blocks" else layers

    return [torch.tensor([column(name) for name in group.names], device=optimizer.device) for group in optimizer.groups]
