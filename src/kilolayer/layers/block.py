"""One Transformer layer: self-attention, cross-attention in the decoder of an encoder-decoder, and the feed-forward network.

Each of them is a residual sublayer (sublayer.py). The feed-forward network can be replaced by a mixture of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from kilolayer.layers.attention import CrossAttention, SelfAttention
from kilolayer.layers.cache import KeyCache
from kilolayer.layers.feedforward import FeedForward
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.routing import Routing
from kilolayer.layers.scale import make_scale
from kilolayer.layers.stream import LayerState
from kilolayer.layers.sublayer import PairSublayer, RoutedPairSublayer, RoutedSublayer, Sublayer
from kilolayer.layers.view import View
from kilolayer.recipes.base import Depths, Kind, Learned, Place, Plan, Recipe, Side

FUNCTIONS = {Kind.SELF_ATTENTION: SelfAttention, Kind.CROSS_ATTENTION: CrossAttention, Kind.FEEDFORWARD: FeedForward}


class LayerOutput(NamedTuple):
    """The output of one layer.

    states: [batch, length, dim], or a Pair of such tensors if the recipe's stream carries a second state.
    routing: statistics of how a layer with experts routed its tokens; None in a dense layer.
    """

    states: LayerState
    routing: Routing | None = None


@dataclass(frozen=True)
class Sparsity:
    """Which layers of a stack have experts: one layer in `every`; `make` builds their feed-forward function from a plan."""

    every: int
    make: Callable[[LayerOptions, Plan], nn.Module]

    def has(self, layer: int) -> bool:
        """Whether this layer, counted from 1, has experts: every `every`-th layer does."""
        return layer % self.every == 0


class Block(nn.Module):
    """Self-attention followed by a feed-forward network: [batch, length, dim] to [batch, length, dim]."""

    self_attention: Sublayer
    feedforward: Sublayer

    def __init__(
        self,
        options: LayerOptions,
        recipe: Recipe,
        side: Side,
        layer: int,
        depths: Depths,
        sparsity: Sparsity | None = None,
    ) -> None:
        super().__init__()
        drop_path = options.drop_path * layer / depths.of(side)
        shared: nn.Module | None = None
        stream = recipe.stream()
        plain, routed = (PairSublayer, RoutedPairSublayer) if stream and stream.has_second else (Sublayer, RoutedSublayer)

        def sublayer(kind: Kind) -> Sublayer:
            nonlocal shared
            plan = recipe.sublayer_plan(Place(kind, side, layer, depths))
            if shared is None and _shares_branch(plan):
                shared = make_scale(plan.branch, options.dim)
            if sparsity is not None and kind is Kind.FEEDFORWARD:
                residual, make = routed, sparsity.make
            else:
                residual, make = plain, FUNCTIONS[kind]
            return residual(make(options, plan), options, plan, drop_path=drop_path, layer_branch=shared)

        for kind in self.kinds():
            self.add_module(kind, sublayer(kind))
        self.layer_branch = shared

    @staticmethod
    def kinds() -> tuple[Kind, ...]:
        """The kinds of the sublayers, in the order in which they run."""
        return (Kind.SELF_ATTENTION, Kind.FEEDFORWARD)

    def sublayers(self) -> list[Sublayer]:
        """The sublayers, in the order in which they run."""
        return [getattr(self, kind) for kind in self.kinds()]

    def forward(self, x: LayerState, view: View, cache: KeyCache | None = None) -> LayerOutput:
        x = self.self_attention(x, view.mask, view.rotation, cache, view.past)
        return LayerOutput(self.feedforward(x))


class SparseBlock(Block):
    """A block whose feed-forward network is a mixture of experts."""

    def forward(self, x: LayerState, view: View, cache: KeyCache | None = None) -> LayerOutput:
        x = self.self_attention(x, view.mask, view.rotation, cache, view.past)
        return LayerOutput(*self.feedforward(x, view.real))


class CrossBlock(Block):
    """A block that also attends to an encoder's output, between self-attention and the feed-forward network."""

    cross_attention: Sublayer

    @staticmethod
    def kinds() -> tuple[Kind, ...]:
        return (Kind.SELF_ATTENTION, Kind.CROSS_ATTENTION, Kind.FEEDFORWARD)

    def forward(self, x: LayerState, view: View, cache: KeyCache | None = None) -> LayerOutput:
        x = self.self_attention(x, view.mask, view.rotation, cache, view.past)
        x = self.cross_attention(x, view.memory, view.memory_mask, cache)
        return LayerOutput(self.feedforward(x))


class SparseCrossBlock(CrossBlock):
    """A block that attends to an encoder's output and whose feed-forward network is a mixture of experts."""

    def forward(self, x: LayerState, view: View, cache: KeyCache | None = None) -> LayerOutput:
        x = self.self_attention(x, view.mask, view.rotation, cache, view.past)
        x = self.cross_attention(x, view.memory, view.memory_mask, cache)
        return LayerOutput(*self.feedforward(x, view.real))


def make_block(
    options: LayerOptions, recipe: Recipe, side: Side, layer: int, depths: Depths, sparsity: Sparsity | None = None
) -> Block:
    """Build the block of one layer, counted from 1."""
    reads = side == "decoder" and depths.paired
    if sparsity is None or not sparsity.has(layer):
        return (CrossBlock if reads else Block)(options, recipe, side, layer, depths)
    return (SparseCrossBlock if reads else SparseBlock)(options, recipe, side, layer, depths, sparsity)


def _shares_branch(plan: Plan) -> bool:
    return isinstance(plan.branch, Learned) and plan.branch.per == "layer"
