"""How states are passed from layer to layer within a stack.

    history = begin(x_0);    for each layer l:  y = block_l(read(history, l)),  history = write(history, y);    end(history)

In most recipes the history is just the latest output (`Latest`). Other streams combine the outputs of several layers or carry
a second state. The type of the history is private to each stream. All states are [batch, length, dim].
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from kilolayer.layers.initialize import KeyedGenerator
from kilolayer.layers.norms.base import make_norm
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.routing import Routing
from kilolayer.layers.scale import make_scale
from kilolayer.recipes.base import NORM, Anchor, Combination, LayerInput, RunningSum, Stream


class Pair(NamedTuple):
    """The state x and the second state beside it, [batch, length, dim] each."""

    x: Tensor
    second: Tensor


LayerState = Tensor | Pair
"""The input and output of a layer."""


class LayerOutput(NamedTuple):
    """The output of one layer.

    states: [batch, length, dim], or a Pair of such tensors if the recipe's stream carries a second state.
    routing: statistics of how a layer with experts routed its tokens; None in a dense layer.
    """

    states: LayerState
    routing: Routing | None = None


def state_of(y: LayerState) -> Tensor:
    """The state x, without a second state."""
    return y.x if isinstance(y, Pair) else y


class StackStream(nn.Module):
    """The interface of a stream, as `Stack.run` uses it.

    states_taken: the number of states [batch, length, dim] that a layer reads. states_kept: the number of states that the
    stream itself keeps per layer for the backward pass, in addition to what the layers keep.
    """

    states_taken: ClassVar[int] = 1
    states_kept: ClassVar[int] = 0

    def begin(self, x: Tensor) -> Any:
        """The history before the first layer; x: the embedded input [batch, length, dim]."""
        raise NotImplementedError

    def write(self, history: Any, y: Any) -> Any:
        """The history after one more layer, whose output is y."""
        raise NotImplementedError

    def read(self, history: Any, layer: int) -> Any:
        """The input of a layer, counted from 0."""
        raise NotImplementedError

    def end(self, history: Any) -> Tensor:
        """The input of the final norm: [batch, length, dim]."""
        raise NotImplementedError

    def of_layer(self, layer: int) -> list[nn.Module]:
        """The modules of the stream that belong to one layer, counted from 0."""
        return []


class Latest(StackStream):
    """Each layer reads the output of the layer below it."""

    def begin(self, x: Tensor) -> Tensor:
        return x

    def write(self, history: Tensor, y: Any) -> Tensor:
        return y

    def read(self, history: Tensor, layer: int) -> Tensor:
        return history

    def end(self, history: Tensor) -> Tensor:
        return history


class LatestWithInput(StackStream):
    """As `Latest`, but the second state of each layer is initialized with the layer's input."""

    def begin(self, x: Tensor) -> Tensor:
        return x

    def write(self, history: Tensor, y: Pair) -> Tensor:
        return y.x

    def read(self, history: Tensor, layer: int) -> Pair:
        return Pair(history, history)

    def end(self, history: Tensor) -> Tensor:
        return history


class LatestWithSum(StackStream):
    """As `Latest`, with a running sum s as second state, to which every sublayer adds: s_0 = scale * x_0, output x + N(s)."""

    states_taken: ClassVar[int] = 2

    def __init__(self, running: RunningSum, options: LayerOptions) -> None:
        super().__init__()
        self.scale = running.scale
        self.norm = make_norm(NORM, options.dim, options)

    def begin(self, x: Tensor) -> Pair:
        return Pair(x, self.scale * x)

    def write(self, history: Pair, y: Pair) -> Pair:
        return y

    def read(self, history: Pair, layer: int) -> Pair:
        return history

    def end(self, history: Pair) -> Tensor:
        return history.x + self.norm(history.second)


class Anchored(StackStream):
    """Each layer reads keep_l * x + add_l * x_0. The history is (x_0, x)."""

    states_kept: ClassVar[int] = 1

    def __init__(self, anchor: Anchor, layers: int, options: LayerOptions) -> None:
        super().__init__()
        self.keep = nn.ModuleList(make_scale(anchor.keep, options.dim) for _ in range(layers))
        self.add = nn.ModuleList(make_scale(anchor.add, options.dim) for _ in range(layers))

    def begin(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x

    def write(self, history: tuple[Tensor, Tensor], y: Tensor) -> tuple[Tensor, Tensor]:
        return history[0], y

    def read(self, history: tuple[Tensor, Tensor], layer: int) -> Tensor:
        first, latest = history
        return self.keep[layer](latest) + self.add[layer](first)

    def end(self, history: tuple[Tensor, Tensor]) -> Tensor:
        return history[1]

    def of_layer(self, layer: int) -> list[nn.Module]:
        return [self.keep[layer], self.add[layer]]


class LayerCombination(StackStream):
    """DLCL: each layer, and the top of the stack, reads a learned combination of the outputs y_k of all layers below it.

    `normalize="each"`: sum_k W[l,k] LN_k(y_k), where the embedding y_0 is not normalized;
    `normalize="sum"`: LN(sum_k W[l,k] y_k), except for the first layer, which reads W[0,0] y_0.
    W [layers + 1, layers + 1] is lower triangular and initialized to the mean: W[l,k] = 1 / (l + 1).
    """

    states_kept: ClassVar[int] = 2

    def __init__(
        self,
        combination: Combination,
        layers: int,
        options: LayerOptions,
    ) -> None:
        super().__init__()
        self.normalizes_each = combination.normalize == "each"
        self.weight = nn.Parameter(torch.empty(layers + 1, layers + 1))
        self.norms = nn.ModuleList(make_norm(NORM, options.dim, options) for _ in range(layers))

    def reset_parameters(self, generator: KeyedGenerator | None = None) -> None:
        rows = torch.arange(1, len(self.weight) + 1, device=self.weight.device, dtype=self.weight.dtype)
        self.weight.copy_(torch.ones_like(self.weight).tril() / rows[:, None])

    def begin(self, x: Tensor) -> list[Tensor]:
        return [x]

    def write(self, history: list[Tensor], y: Tensor) -> list[Tensor]:
        return [*history, self.norms[len(history) - 1](y) if self.normalizes_each else y]

    def read(self, history: list[Tensor], layer: int) -> Tensor:
        weights = self.weight[layer, : layer + 1].unbind()
        # Term by term, so that each output is kept once; a product of stacked outputs would keep a copy for every layer.
        combined = weights[0] * history[0]
        for weight, output in zip(weights[1:], history[1:], strict=True):
            combined = torch.addcmul(combined, weight, output)
        return combined if self.normalizes_each or layer == 0 else self.norms[layer - 1](combined)

    def end(self, history: list[Tensor]) -> Tensor:
        return self.read(history, len(history) - 1)

    def of_layer(self, layer: int) -> list[nn.Module]:
        if self.normalizes_each:
            return [self.norms[layer]]
        return [self.norms[layer - 1]] if layer else []


def make_stream(stream: Stream | None, layers: int, options: LayerOptions) -> StackStream:
    """Build the stream that a recipe asks for; None: `Latest`."""
    match stream:
        case None:
            return Latest()
        case Combination():
            return LayerCombination(stream, layers, options)
        case Anchor():
            return Anchored(stream, layers, options)
        case LayerInput():
            return LatestWithInput()
        case RunningSum():
            return LatestWithSum(stream, options)
        case _:
            raise TypeError(f"{type(stream).__name__} is no known stream")
