"""What each layer does in a step: the size of its gradient, of its update and of the residual stream after it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kilolayer.models.model import Model
from kilolayer.models.outputs import DecoderOutput, EncoderDecoderOutput, EncoderOutput
from kilolayer.training.optimizer import Optimizer

ByLayer = dict[str, list[float]]


@dataclass
class LayerNorms:
    """Norms by stack and layer: of the gradient and of the update of a layer's weights, and the residual's root mean square."""

    gradient: ByLayer = field(default_factory=dict)
    update: ByLayer = field(default_factory=dict)
    residual: ByLayer = field(default_factory=dict)

    def rounded(self) -> dict[str, ByLayer]:
        """All norms by name in six digits, which take half the space of all digits in a file."""
        return {
            name: {side: [float(f"{norm:.6g}") for norm in norms] for side, norms in stacks.items()}
            for name, stacks in vars(self).items()
        }


class Meter:
    """Measures layers while a step runs, without reading anything back, so that a recorded step can do it too.

    `found` [3, layers + 1]: squares of gradient and update norms, and sums over batches of the residual's root mean square, of
    all stacks one after the other; the last column gathers what is in no layer.
    """

    def __init__(self, model: Model, optimizer: Optimizer) -> None:
        self.stacks, self.optimizer = model.stacks(), optimizer
        layers = sum(len(stack.blocks) for stack in self.stacks)
        self.found = torch.zeros(3, layers + 1, dtype=torch.float64, device=optimizer.device)
        self.columns = columns_of(model, optimizer)

    def note_residuals(self, out: EncoderOutput | DecoderOutput | EncoderDecoderOutput) -> None:
        """After a forward that returned hidden states."""
        encoder = out.encoder_hidden_states if isinstance(out, EncoderDecoderOutput) else None
        states = [*(encoder or ())[1:], *(out.hidden_states or ())[1:]]
        self.residuals[:-1] += torch.stack([state.detach().double().square().mean().sqrt() for state in states])

    @property
    def residuals(self) -> Tensor:
        """What `note_residuals` has summed so far: [layers + 1]."""
        return self.found[2]

    def note_gradients(self) -> None:
        """Before the update."""
        self._note(0, self.optimizer.gradient_norms())

    def note_update(self, factors: Tensor) -> None:
        """After the update, with its coefficients."""
        self._note(1, self.optimizer.update_norms(factors))

    def read(self, norms: LayerNorms, batches: int, scale: float) -> None:
        """Put what was found into `norms`, and forget it; gradients were `scale` times too large."""
        gradient, update, residual = self.found.tolist()
        self.found.zero_()
        norms.gradient = self._by_stack([value**0.5 / scale for value in gradient])
        norms.update = self._by_stack([value**0.5 for value in update])
        norms.residual = self._by_stack([value / batches for value in residual])

    def _note(self, row: int, norms: list[Tensor]) -> None:
        for columns, each in zip(self.columns, norms, strict=True):
            self.found[row].index_add_(0, columns, each.double().square())

    def _by_stack(self, values: list[float]) -> ByLayer:
        rest = iter(values)
        return {stack.side: [next(rest) for _ in stack.blocks] for stack in self.stacks}


def columns_of(model: Model, optimizer: Optimizer) -> list[Tensor]:
    """The layer of each weight, group by group: int64 [weights of the group].

    The layers of all stacks are counted one after the other, and behind the last stands what is in no layer.
    """
    stacks = model.stacks()
    starts = {stack.side: sum(len(other.blocks) for other in stacks[:index]) for index, stack in enumerate(stacks)}
    layers = sum(len(stack.blocks) for stack in stacks)

    def column(name: str) -> int:
        side, *path = name.split(".")
        return starts[side] + int(path[1]) if path[0] == "blocks" else layers

    return [torch.tensor([column(name) for name in group.names], device=optimizer.device) for group in optimizer.groups]
