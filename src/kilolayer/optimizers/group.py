"""Weights that are updated together, with their state in flat buffers."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kilolayer.optimizers.base import Part, UpdateRule
from kilolayer.parallel.peers import Peers

AT_ONCE = 64
ALIGNMENT = 64  # elements; each tensor's part of a flat buffer starts where wide loads are possible


@dataclass
class Group:
    """Weights of one dtype with the same rule; each slot of their state, and their masters, are in one flat buffer, in order.

    rates: the factor on the learning rate of each weight. of_experts: whether each expert of a sparse model has its own copy of
    these weights. sharers: the processes among which the weights are divided, by one axis after the other; empty if all are
    whole. of_shards: whether they are divided by FSDP2. buffers: [size] each: the slots of the rule by name, and optionally
    `masters`, `sums` and `weights`.
    """

    names: list[str]
    weights: list[nn.Parameter]
    rule: UpdateRule
    rates: list[float]
    of_experts: bool = False
    of_shards: bool = False
    sharers: tuple[Peers, ...] = ()
    starts: list[int] = field(init=False)
    state: dict[str, list[Tensor]] = field(init=False)
    masters: list[Tensor] | None = field(init=False, default=None)
    sums: list[Tensor] | None = field(init=False, default=None)
    buffers: dict[str, Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        ends = torch.tensor([-(-weight.numel() // ALIGNMENT) * ALIGNMENT for weight in self.weights]).cumsum(0).tolist()
        self.starts, self.size = [0, *ends[:-1]], ends[-1]
        self.state = {slot: self._buffer(slot) for slot in self.rule.slots}

    @property
    def decay(self) -> float:
        """The weight decay."""
        return self.rule.decay

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the state: fp32 or higher precision."""
        return torch.promote_types(self.weights[0].dtype, torch.float32)

    def keep_masters(self, precise: Mapping[nn.Parameter, Tensor]) -> None:
        """Keep an fp32 master copy of each weight, from its value before rounding."""
        self.masters = self._buffer("masters")
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.copy_(precise[weight])

    def keep_sums(self) -> None:
        """Allocate buffers that gradients are accumulated in over batches."""
        self.sums = self._buffer("sums")

    def join_weights(self) -> None:
        """Move the weights into one flat buffer too, so that an update takes a few operations in all, not a few per weight."""
        for buffer, weight in zip(self._buffer("weights"), self.weights, strict=True):
            weight.data = buffer.copy_(weight.data)

    @property
    def has_equal_rates(self) -> bool:
        """Whether all weights have the same learning rate."""
        return all(rate == self.rates[0] for rate in self.rates)

    @property
    def precise(self) -> list[Tensor]:
        """The weights in the highest precision that is held."""
        return [weight.detach() for weight in self.masters or self.weights]

    @property
    def gradients(self) -> list[Tensor | None]:
        """What the next update reads: the sums over batches if they are kept, else the gradients of the last backward pass."""
        return list(self.sums) if self.sums is not None else [weight.grad for weight in self.weights]

    def collect(self) -> None:
        """Add the last gradients to the sums."""
        assert self.sums is not None
        pairs = [(total, weight.grad) for total, weight in zip(self.sums, self.weights, strict=True)]
        present = [(total, gradient) for total, gradient in pairs if gradient is not None]
        torch._foreach_add_([total for total, _ in present], [gradient for _, gradient in present])

    def parts(self, at_once: int = AT_ONCE) -> Iterator[Part]:
        """A few weights at a time, without gradients; all at once would need a second copy of the model for each temporary."""
        weights = self.precise
        for start in range(0, len(weights), at_once):
            few = slice(start, start + at_once)
            yield Part(weights[few], [], {slot: each[few] for slot, each in self.state.items()}, self.rates[few])

    def gradient_parts(self, scale: float | Tensor, at_once: int | None) -> Iterator[tuple[list[int], Part]]:
        """The weights that have a gradient, with the gradients times `scale`, and their indices in the group.

        at_once: the number of weights; None: all of them, for an elementwise rule as one flat tensor if they are joined.
        """
        precise, given = self.precise, self.gradients
        present = [index for index, gradient in enumerate(given) if gradient is not None]
        joined = self.buffers.get("masters", self.buffers.get("weights"))
        is_flat = at_once is None and self.rule.elementwise and self.sums is not None and self.has_equal_rates
        if is_flat and joined is not None:
            state = {slot: [self.buffers[slot]] for slot in self.rule.slots}
            yield present, Part([joined], _scaled([self.buffers["sums"]], scale), state, self.rates[:1])
            return
        step = at_once or len(present) or 1
        for few in (present[start : start + step] for start in range(0, len(present), step)):
            gradients = [gradient.to(self.dtype) for index in few if (gradient := given[index]) is not None]
            state = {slot: [each[index] for index in few] for slot, each in self.state.items()}
            weights, rates = [precise[index] for index in few], [self.rates[index] for index in few]
            yield few, Part(weights, _scaled(gradients, scale), state, rates)

    def round_masters(self, few: Sequence[int]) -> None:
        """Copy the masters of these weights to the weights."""
        if self.masters is not None:
            rounded: list[Tensor] = [self.weights[index].detach() for index in few]
            torch._foreach_copy_(rounded, [self.masters[index] for index in few])

    def _buffer(self, name: str) -> list[Tensor]:
        """A tensor for each weight, in fp32 or higher precision: views of one zeroed buffer."""
        flat = self.buffers[name] = torch.zeros(self.size, dtype=self.dtype, device=self.weights[0].device)
        return [
            flat[start : start + weight.numel()].view(weight.shape)
            for start, weight in zip(self.starts, self.weights, strict=True)
        ]


def _scaled(gradients: list[Tensor], scale: float | Tensor) -> list[Tensor]:
    if isinstance(scale, Tensor):
        return list(torch._foreach_mul(gradients, scale.to(gradients[0].dtype)))
    return gradients if scale == 1.0 else list(torch._foreach_mul(gradients, scale))
