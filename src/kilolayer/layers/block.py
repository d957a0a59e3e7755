"""One Transformer layer: self-attention, cross-attention in the decoder of an encoder-decoder, and the feed-forward network.

Each of them is a residual sublayer (sublayer.py). The feed-forward network can be replaced by a mixture of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from kilolayer.errors import OptionError
from kilolayer.layers.attention import CrossAttention, SelfAttention
from kilolayer.layers.cache import KeyCache
from kilolayer.layers.context import AttentionContext
from kilolayer.layers.feedforward import FeedForward
from kilolayer.layers.multiway import Split, pair_modules
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.scale import make_scale
from kilolayer.layers.stream import LayerOutput, LayerState
from kilolayer.layers.sublayer import ExtendedSublayer, Sublayer
from kilolayer.recipes.base import Depths, Kind, Learned, Place, Plan, Recipe, Scale, Side

FUNCTIONS = {Kind.SELF_ATTENTION: SelfAttention, Kind.CROSS_ATTENTION: CrossAttention, Kind.FEEDFORWARD: FeedForward}


@dataclass(frozen=True)
class Sparsity:
    """Which layers of a stack have experts: one layer in `every`; `make` builds their feed-forward function from a plan."""

    every: int
    make: Callable[[LayerOptions, Plan], nn.Module]

    def has(self, layer: int) -> bool:
        """Whether this layer, counted from 1, has experts: every `every`-th layer does."""
        return layer % self.every == 0


class Block(nn.Module):
    """Self-attention followed by a feed-forward network, or by experts: [batch, length, dim] to [batch, length, dim]."""

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
        self.is_sparse = sparsity is not None
        drop_path = options.drop_path * layer / depths.of(side)
        shared: nn.Module | None = None
        branch: Scale | None = None
        stream = recipe.stream()
        has_second = stream is not None and stream.has_second

        def sublayer(kind: Kind) -> Sublayer:
            nonlocal shared, branch
            plan = recipe.sublayer_plan(Place(kind, side, layer, depths))
            is_shared = isinstance(plan.branch, Learned) and plan.branch.per == "layer"
            if is_shared and shared is None:
                shared, branch = make_scale(plan.branch, options.dim), plan.branch
            elif is_shared and plan.branch != branch:
                what = f"the sublayers of layer {layer} share two different branch scales: {branch} and {plan.branch}"
                raise OptionError(what, where="recipe", fix="give them the same Learned, or per='sublayer'")
            experts = None if kind is not Kind.FEEDFORWARD else sparsity
            f = FUNCTIONS[kind](options, plan) if experts is None else experts.make(options, plan)
            form = Sublayer if experts is None and not has_second else ExtendedSublayer
            return form(f, options, plan, drop_path=drop_path, layer_branch=shared if is_shared else None)

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

    def forward(self, x: LayerState, context: AttentionContext, cache: KeyCache | None = None) -> LayerOutput:
        x = self.self_attention(x, context.mask, context.rotation, cache, context.past)
        return self.run_feedforward(x, context)

    def run_feedforward(self, x: LayerState, context: AttentionContext) -> LayerOutput:
        """The last sublayer; experts are also told which positions are real."""
        y = self.feedforward(x, context.real) if self.is_sparse else self.feedforward(x)
        return y if isinstance(y, LayerOutput) else LayerOutput(y)


class CrossBlock(Block):
    """A block that also attends to an encoder's output, between self-attention and the feed-forward network."""

    cross_attention: Sublayer

    @staticmethod
    def kinds() -> tuple[Kind, ...]:
        return (Kind.SELF_ATTENTION, Kind.CROSS_ATTENTION, Kind.FEEDFORWARD)

    def forward(self, x: LayerState, context: AttentionContext, cache: KeyCache | None = None) -> LayerOutput:
        x = self.self_attention(x, context.mask, context.rotation, cache, context.past)
        x = self.cross_attention(x, context.memory, context.memory_mask, cache)
        return self.run_feedforward(x, context)


class MultiwayBlock(Block):
    """A block whose norms and projections are pairs (multiway.py), one of each for each modality."""

    def __init__(self, *values: Any, **options: Any) -> None:
        super().__init__(*values, **options)
        self.split = pair_modules(self, Split())

    def forward(self, x: LayerState, context: AttentionContext, cache: KeyCache | None = None) -> LayerOutput:
        # Set by every pass, because a recomputation in the backward pass may follow the pass of another batch.
        self.split.position = context.split
        return super().forward(x, context, cache)


def make_block(
    options: LayerOptions, recipe: Recipe, side: Side, layer: int, depths: Depths, sparsity: Sparsity | None = None
) -> Block:
    """Build the block of one layer, counted from 1."""
    kind = CrossBlock if side == "decoder" and depths.paired else MultiwayBlock if options.multiway else Block
    return kind(options, recipe, side, layer, depths, sparsity if sparsity is not None and sparsity.has(layer) else None)
