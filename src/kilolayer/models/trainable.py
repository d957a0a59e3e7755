"""What training asks of a model: our Transformers answer it (`Model`), and so can any torch module that a task brings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from kilolayer.layers.stack import Stack


class StepSums(Protocol):
    """What a step sums over its batches and processes besides gradients, for changes of the model that no gradient makes.

    Nothing is read from the device, so that the step can be captured in a CUDA graph.
    """

    @property
    def of_step(self) -> Sequence[Tensor]:
        """The sums so far, which several processes add up before the step ends."""
        ...

    def record(self, output: Any) -> None:
        """Add a batch; output: that of the task's `Loss`."""
        ...

    def end_step(self, finite: Tensor) -> None:
        """Change the model by the sums if the step is `finite`, bool [], and clear them."""
        ...

    def discard_step(self) -> None:
        """Clear the sums."""
        ...


class Trainable(nn.Module):
    """A model that a task trains: a torch module with its configuration. A model of a task's own extends it."""

    config: Any

    def stacks(self) -> list[Stack]:
        """The stacks of layers that are measured and watched during training."""
        return []

    def step_sums(self) -> StepSums | None:
        """What the model takes from a step besides gradients; None: nothing."""
        return None
