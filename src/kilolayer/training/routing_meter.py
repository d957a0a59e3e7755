"""Statistics of how expert layers route their tokens, summed over steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kilolayer.models.outputs import DecoderOutput, EncoderDecoderOutput, EncoderOutput
from kilolayer.models.trainable import Trainable
from kilolayer.moe.balance import balanced_routers, update_balance
from kilolayer.moe.layer import sparse_layers

NUMBERS = ("entropy", "dropped", "temperature")
SUMS = ("load", "tokens", "numbers", "batches")


class RoutingMeter:
    """Sums over batches and steps without reading from the device, so that the step can be captured in a CUDA graph.

    load [layers, experts]: choices of each expert. tokens [layers]: tokens that made them. numbers [layers, 3]: entropy,
    dropped fraction and temperature, summed over batches. A step that is not finite is not counted.
    """

    def __init__(self, model: Trainable, device: torch.device) -> None:
        assert model.config.moe is not None
        self.model = model
        self.layers = [_title(name) for name in sparse_layers(model)]
        # A linear router has no temperature.
        self.reported = NUMBERS if model.config.moe.router == "xmoe" else NUMBERS[:-1]
        # A frozen router is not changed, nor are its biases.
        self.balances = any(router.weight.requires_grad for router in balanced_routers(model))
        count = len(self.layers)
        shapes = (count, model.config.moe.experts), (count,), (count, len(NUMBERS)), ()
        self.of_step, self.total = ([torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes] for _ in "ab")

    def record(self, output: EncoderOutput | DecoderOutput | EncoderDecoderOutput) -> None:
        """Add the routing that a batch's forward pass returned, layer by layer."""
        routing = output.routing
        assert routing is not None
        load, tokens, numbers, batches = self.of_step
        load += torch.stack([layer.load for layer in routing])
        tokens += torch.stack([layer.tokens for layer in routing])
        numbers += torch.stack([torch.stack([layer.entropy, layer.dropped, layer.temperature]) for layer in routing])
        batches += 1

    def end_step(self, finite: Tensor) -> None:
        """Count the step's batches if it is `finite`, and update the biases of loss-free balancing."""
        if self.balances:
            # Equal loads leave the biases unchanged.
            update_balance(self.model, list(torch.where(finite, self.of_step[0], 0.0)))
        for total, of_step in zip(self.total, self.of_step, strict=True):
            total += torch.where(finite, of_step, 0.0)
        self.discard_step()

    def discard_step(self) -> None:
        for of_step in self.of_step:
            of_step.zero_()

    def read(self) -> dict[str, Any]:
        """The statistics since the last call, by layer.

        The number of tokens and of their choices; load: the fraction of choices for each expert; means of the other numbers,
        the temperature only if the routers have one.
        """
        load, tokens, numbers, batches = self.total
        choices = load.sum(dim=1)
        counts = {"tokens": tokens.long().tolist(), "choices": choices.long().tolist()}
        means = dict(zip(NUMBERS, (numbers / batches.clamp(min=1)).mT.tolist(), strict=True))
        shares = load / choices[:, None].clamp(min=1)
        entry = {"layers": self.layers, **counts, **{name: means[name] for name in self.reported}, "load": shares.tolist()}
        for total in self.total:
            total.zero_()
        return entry

    def state(self) -> dict[str, Any]:
        """The sums so far, as JSON values."""
        return {name: total.tolist() for name, total in zip(SUMS, self.total, strict=True)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name, total in zip(SUMS, self.total, strict=True):
            total.copy_(torch.tensor(state[name], dtype=total.dtype))


def _title(name: str) -> str:
    """The layer's title: decoder.blocks.1.feedforward.f is layer 2 of the decoder."""
    side, _, index, *_ = name.split(".")
    return f"{side} {int(index) + 1}"
