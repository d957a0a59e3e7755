"""How layers with experts sent their tokens, summed over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kilolayer.layers.routing import Routing
from kilolayer.models.model import Model
from kilolayer.moe.balance import balanced_routers, update_balance
from kilolayer.moe.layer import sparse_layers

NUMBERS = ("entropy", "dropped", "temperature")
SUMS = ("load", "tokens", "numbers", "batches")


class RoutingMeter:
    """Sums over the batches of a step, and over steps, without reading anything back, so that a recorded step can do it too.

    load [layers, experts]: choices that fell on each expert. tokens [layers]: that made them. numbers [layers, 3]: entropy,
    dropped share and temperature, summed over batches. A step that is not finite leaves no trace.
    """

    def __init__(self, model: Model, device: torch.device) -> None:
        assert model.config.moe is not None
        self.model = model
        self.layers = [_title(name) for name in sparse_layers(model)]
        # A linear router has no temperature.
        self.reported = NUMBERS if model.config.moe.router == "xmoe" else NUMBERS[:-1]
        # A frozen router stays as it is, and its biases are a part of it.
        self.balances = any(router.weight.requires_grad for router in balanced_routers(model))
        count = len(self.layers)
        shapes = (count, model.config.moe.experts), (count,), (count, len(NUMBERS)), ()
        self.of_step, self.total = ([torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes] for _ in "ab")

    def note(self, routing: Sequence[Routing]) -> None:
        """Add what a batch's forward returned, layer by layer."""
        load, tokens, numbers, batches = self.of_step
        load += torch.stack([layer.load for layer in routing])
        tokens += torch.stack([layer.tokens for layer in routing])
        numbers += torch.stack([torch.stack([layer.entropy, layer.dropped, layer.temperature]) for layer in routing])
        batches += 1

    def end_step(self, finite: Tensor) -> None:
        """Count the step's batches where it is `finite`, and move the biases of loss-free balancing."""
        if self.balances:
            # Equal loads move nothing.
            update_balance(self.model, list(torch.where(finite, self.of_step[0], 0.0)))
        for total, of_step in zip(self.total, self.of_step, strict=True):
            total += torch.where(finite, of_step, 0.0)
        self.forget_step()

    def forget_step(self) -> None:
        for of_step in self.of_step:
            of_step.zero_()

    def read(self) -> dict[str, Any]:
        """What happened since the last time, by layer.

        tokens, and the choices that they made; load: each expert's share of the choices; the others as means, the temperature
        where the routers have one.
        """
        load, tokens, numbers, batches = self.total
        choices = load.sum(dim=1)
        counts = {"tokens": tokens.long().tolist(), "choices": choices.long().tolist()}
        means = dict(zip(NUMBERS, (numbers / batches.clamp(min=1)).mT.tolist(), strict=True))
        shares = load / choices[:, None].clamp(min=1)
        found = {"layers": self.layers, **counts, **{name: means[name] for name in self.reported}, "load": shares.tolist()}
        for total in self.total:
            total.zero_()
        return found

    def state(self) -> dict[str, Any]:
        """The sums so far, as JSON holds them."""
        return {name: total.tolist() for name, total in zip(SUMS, self.total, strict=True)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name, total in zip(SUMS, self.total, strict=True):
            total.copy_(torch.tensor(state[name], dtype=total.dtype))


def _title(name: str) -> str:
    """decoder.blocks.1.feedforward.f is layer 2 of the decoder."""
    side, _, index, *_ = name.split(".")
    return f"{side} {int(index) + 1}"
