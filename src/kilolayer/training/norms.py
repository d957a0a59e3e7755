"""Measures each layer during a step: the norms of its gradient and its update, its largest attention logits, and the residual
stream after it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kilolayer.models.outputs import DecoderOutput, EncoderDecoderOutput, EncoderOutput
from kilolayer.models.trainable import Trainable
from kilolayer.optimizers.optimizer import Optimizer
from kilolayer.parallel.processes import Processes

ByLayer = dict[str, list[float]]


@dataclass
class LayerNorms:
    """Norms by stack and layer: of the gradient and the update of a layer's weights, and the residual stream's RMS.

    attention_logit, cross_attention_logit: the largest logit, q k^T / sqrt(head_dim) with its position bias, of real positions,
    over all heads and the first rows of each batch that have 512 positions; not of a stack in which attention is a user's own.
    """

    gradient: ByLayer = field(default_factory=dict)
    update: ByLayer = field(default_factory=dict)
    residual: ByLayer = field(default_factory=dict)
    attention_logit: ByLayer = field(default_factory=dict)
    cross_attention_logit: ByLayer = field(default_factory=dict)

    def rounded(self) -> dict[str, ByLayer]:
        """All that was measured by name, rounded to six digits, which halves its size in a file."""
        return {
            name: {side: [float(f"{norm:.6g}") for norm in norms] for side, norms in stacks.items()}
            for name, stacks in vars(self).items()
            if stacks
        }


class Meter:
    """Measures layers during a step without reading from the device, so that the step can be captured in a CUDA graph.

    `found` [3, layers + 1]: squared gradient norms, squared update norms, and the residual stream's RMS summed over batches.
    The layers of all stacks follow one another; the last column collects what belongs to no layer.
    `logits`: for each layer, the largest logit of self- and of cross-attention so far, fp32 [] each.
    """

    def __init__(self, model: Trainable, optimizer: Optimizer) -> None:
        self.stacks, self.optimizer = model.stacks(), optimizer
        layers = sum(len(stack.blocks) for stack in self.stacks)
        self.found = torch.zeros(3, layers + 1, dtype=torch.float64, device=optimizer.device)
        # One tensor each: a compiled layer cannot write into two that share their memory.
        self.logits = [(_lowest(optimizer.device), _lowest(optimizer.device)) for _ in range(layers)]
        self.columns = columns_of(model, optimizer)

    @contextmanager
    def recording_logits(self, form: Trainable) -> Iterator[None]:
        """A context in which the forward passes of `form`, a form of the model, raise `logits`."""
        rest = iter(self.logits)
        stacks = form.stacks()
        try:
            for stack in stacks:
                stack.largest_logits = [next(rest) for _ in stack.blocks]
            yield
        finally:
            for stack in stacks:
                stack.largest_logits = None

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

    def read(self, norms: LayerNorms, batches: int, scale: float, processes: Processes) -> None:
        """Move the measurements into `norms` and reset them; the gradients were `scale` times too large."""
        gradient, update, residual = self.found.tolist()
        largest = torch.stack([torch.stack(pair) for pair in self.logits])
        processes.max_(largest)
        self.reset()
        norms.attention_logit, norms.cross_attention_logit = map(self._raised, largest.T.tolist())
        norms.gradient = self._by_stack([value**0.5 / scale for value in gradient])
        norms.update = self._by_stack([value**0.5 for value in update])
        norms.residual = self._by_stack([value / batches for value in residual])

    def _raised(self, logits: list[float]) -> ByLayer:
        """By stack, without the stacks whose attention has recorded nothing."""
        return {side: each for side, each in self._by_stack(logits).items() if -math.inf not in each}

    def reset(self) -> None:
        """Forget what was measured."""
        self.found.zero_()
        for pair in self.logits:
            for largest in pair:
                largest.fill_(-torch.inf)

    def _accumulate(self, row: int, norms: list[Tensor]) -> None:
        for columns, each in zip(self.columns, norms, strict=True):
            self.found[row].index_add_(0, columns, each.double().square())

    def _by_stack(self, values: list[float]) -> ByLayer:
        rest = iter(values)
        return {stack.side: [next(rest) for _ in stack.blocks] for stack in self.stacks}


def _lowest(device: torch.device) -> Tensor:
    return torch.full((), -torch.inf, device=device)


def columns_of(model: Trainable, optimizer: Optimizer) -> list[Tensor]:
    """The column of each weight's layer, group by group: int64 [weights of the group].

    The layers of all stacks are numbered consecutively; one more column follows for weights that belong to no layer.
    """
    stacks = model.stacks()
    starts = {stack.side: sum(len(other.blocks) for other in stacks[:index]) for index, stack in enumerate(stacks)}
    layers = sum(len(stack.blocks) for stack in stacks)

    def column(name: str) -> int:
        side, *path = name.split(".")
        return starts[side] + int(path[1]) if side in starts and path[0] == "blocks" else layers

    return [torch.tensor([column(name) for name in group.names], device=optimizer.device) for group in optimizer.groups]
