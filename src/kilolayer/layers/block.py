"""A layer: self-attention, cross-attention where there is a source to read, and the feed-forward network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kilolayer.layers.attention import CrossAttention, SelfAttention
from kilolayer.layers.cache import KeptKeys
from kilolayer.layers.feedforward import FeedForward
from kilolayer.layers.mask import Mask
from kilolayer.layers.memory import Memory
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.position import Rotation
from kilolayer.layers.routing import Routing
from kilolayer.layers.scale import make_scale
from kilolayer.layers.state import State
from kilolayer.layers.sublayer import RoutedSublayer, Sublayer
from kilolayer.recipes.base import Depths, Kind, Learned, Place, Plan, Recipe, Side

FUNCTIONS = {Kind.SELF_ATTENTION: SelfAttention, Kind.CROSS_ATTENTION: CrossAttention, Kind.FEEDFORWARD: FeedForward}


@dataclass(frozen=True)
class View:
    """What the layers of a stack see besides the state: equal for all of them, made once a forward.

    real: bool [batch, length], False at padding, None where there is none. memory: None also where all layers have kept the
    source's keys and values.
    """

    mask: Mask
    rotation: Rotation | None = None
    past: int | Tensor = 0
    memory: Memory | None = None
    memory_mask: Mask | None = None
    real: Tensor | None = None

    def read_memory(self) -> Tensor | None:
        """The encoder's output as one layer reads it."""
        return None if self.memory is None else self.memory.read()


class LayerOutput(NamedTuple):
    """states [batch, length, dim]; routing: what a layer with experts tells."""

    states: State
    routing: Routing | None = None


@dataclass(frozen=True)
class Sparsity:
    """Which layers of a stack have experts, every how many, and what makes their feed-forward function from a plan."""

    every: int
    make: Callable[[LayerOptions, Plan, torch.device | None, torch.dtype | None], nn.Module]

    def has(self, layer: int) -> bool:
        """Whether this layer, counted from 1, has experts: the last of each `every` layers."""
        return layer % self.every == 0


class Block(nn.Module):
    """Self-attention and feed-forward network. [batch, length, dim] to the same.

    Its forward takes the norm that the next layer begins with, `following`: it may be applied where the state is written.
    """

    self_attention: Sublayer
    feedforward: Sublayer

    def __init__(
        self,
        options: LayerOptions,
        recipe: Recipe,
        side: Side,
        layer: int,
        depths: Depths,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        sparsity: Sparsity | None = None,
    ) -> None:
        super().__init__()
        drop_path = options.drop_path * layer / depths.of(side)
        shared: nn.Module | None = None

        def sublayer(kind: Kind) -> Sublayer:
            nonlocal shared
            plan = recipe.plan(Place(kind, side, layer, depths))
            if shared is None and _shares_branch(plan):
                shared = make_scale(plan.branch, options.dim, device, dtype)
            if sparsity is not None and kind is Kind.FEEDFORWARD:
                residual, make = RoutedSublayer, sparsity.make
            else:
                residual, make = Sublayer, FUNCTIONS[kind]
            return residual(
                make(options, plan, device, dtype),
                options,
                plan,
                drop_path=drop_path,
                layer_branch=shared,
                device=device,
                dtype=dtype,
            )

        for kind in self.kinds():
            self.add_module(kind, sublayer(kind))
        self.layer_branch = shared

    @staticmethod
    def kinds() -> tuple[Kind, ...]:
        """The sublayers in their order."""
        return (Kind.SELF_ATTENTION, Kind.FEEDFORWARD)

    def sublayers(self) -> list[Sublayer]:
        """The sublayers in their order."""
        return [getattr(self, kind) for kind in self.kinds()]

    def start(self, x: Tensor, dtype: torch.dtype, following: nn.Module | None) -> State:
        """What the first layer of a stack reads, prepared as layers do it for each other: so one compiled layer serves all."""
        first, *_, last = self.sublayers()
        if not last.is_fused(x, dtype, following):
            return State.of(x)
        return State(x, x.to(dtype)) if first.opening is None else State.of(x, first.opening(x).to(dtype))

    def forward(self, x: State, view: View, cache: KeptKeys | None = None, following: nn.Module | None = None) -> LayerOutput:
        x = self.self_attention(x, view.mask, view.rotation, cache, view.past, following=self.feedforward.opening)
        return LayerOutput(self.feedforward(x, following=following))


class SparseBlock(Block):
    """A block whose feed-forward network is many experts."""

    def forward(self, x: State, view: View, cache: KeptKeys | None = None, following: nn.Module | None = None) -> LayerOutput:
        x = self.self_attention(x, view.mask, view.rotation, cache, view.past, following=self.feedforward.opening)
        return LayerOutput(*self.feedforward(x, view.real, following=following))


class CrossBlock(Block):
    """A block that also reads an encoder's output."""

    cross_attention: Sublayer

    @staticmethod
    def kinds() -> tuple[Kind, ...]:
        return (Kind.SELF_ATTENTION, Kind.CROSS_ATTENTION, Kind.FEEDFORWARD)

    def forward(self, x: State, view: View, cache: KeptKeys | None = None, following: nn.Module | None = None) -> LayerOutput:
        x = self.self_attention(x, view.mask, view.rotation, cache, view.past, following=self.cross_attention.opening)
        x = self.cross_attention(x, view.read_memory(), view.memory_mask, cache, following=self.feedforward.opening)
        return LayerOutput(self.feedforward(x, following=following))


class SparseCrossBlock(CrossBlock):
    """A block that reads an encoder's output and whose feed-forward network is many experts."""

    def forward(self, x: State, view: View, cache: KeptKeys | None = None, following: nn.Module | None = None) -> LayerOutput:
        x = self.self_attention(x, view.mask, view.rotation, cache, view.past, following=self.cross_attention.opening)
        x = self.cross_attention(x, view.read_memory(), view.memory_mask, cache, following=self.feedforward.opening)
        return LayerOutput(*self.feedforward(x, view.real, following=following))


def make_block(
    options: LayerOptions,
    recipe: Recipe,
    side: Side,
    layer: int,
    depths: Depths,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    sparsity: Sparsity | None = None,
) -> Block:
    """The block of one layer, counted from 1."""
    reads = side == "decoder" and depths.paired
    if sparsity is None or not sparsity.has(layer):
        return (CrossBlock if reads else Block)(options, recipe, side, layer, depths, device, dtype)
    return (SparseCrossBlock if reads else SparseBlock)(options, recipe, side, layer, depths, device, dtype, sparsity)


def _shares_branch(plan: Plan) -> bool:
    return isinstance(plan.branch, Learned) and plan.branch.per == "layer"
