"""A stack of layers: positions at its input, blocks, and what the recipe puts on top."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from kilolayer.errors import InputError
from kilolayer.layers.attention import Attention
from kilolayer.layers.block import Block, Sparsity, make_block
from kilolayer.layers.cache import Cache, KeyCache
from kilolayer.layers.norm import make_norm
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.position import Positions
from kilolayer.layers.routing import Routing
from kilolayer.layers.scale import make_scale, make_shift
from kilolayer.layers.stream import make_stream, state_of
from kilolayer.layers.sublayer import Sublayer
from kilolayer.layers.view import Sequences, View, make_view, mask_of_memory, place
from kilolayer.recipes.base import Depths, Kind, Learned, Recipe, Side

AttentionWeights = tuple[Tensor | None, ...]
"""[batch, heads, queries, keys] of each layer; None of a layer whose attention is a module of one's own."""


@dataclass(frozen=True)
class StackOutput:
    """states [batch, length, dim], and, on request, the embedded input and the output of each layer.

    routing: how each layer with experts sent its tokens to them; None where there is none. attention and cross_attention, on
    request: the weights of each layer.
    """

    states: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
    routing: tuple[Routing, ...] | None = None
    attention: AttentionWeights | None = None
    cross_attention: AttentionWeights | None = None

    @property
    def router_loss(self) -> Tensor:
        """The sum of the layers'; 0 where none has experts."""
        if self.routing is None:
            return self.states.new_zeros(())
        return torch.stack([layer.router_loss for layer in self.routing]).sum()


class Stack(nn.Module):
    """An encoder's or a decoder's layers."""

    def __init__(
        self,
        options: LayerOptions,
        recipe: Recipe,
        side: Side,
        depths: Depths,
        *,
        final_norm: bool | None = None,
        first_eps: float | None = None,
        input_norm: bool = False,
        sparsity: Sparsity | None = None,
        output_factor: float = 1.0,
    ) -> None:
        """input_norm: a norm on the embedded input, where the recipe has none; output_factor: on the states, where a vocabulary
        scores them."""
        super().__init__()
        self.side: Side = side
        top = recipe.top(side, depths)
        self.positions = Positions(options, side)
        self.input_norm = make_norm(input_norm or recipe.input_norm(side, depths), options.dim, options)
        self.dropout = nn.Dropout(options.dropout) if options.dropout else nn.Identity()
        self.blocks = nn.ModuleList(
            make_block(options, recipe, side, layer, depths, sparsity) for layer in range(1, depths.of(side) + 1)
        )
        if first_eps is not None:
            self.sublayers()[0].set_out_eps(first_eps)
        self.stream = make_stream(recipe.stream(), len(self.blocks), options)
        self.top_norm = make_norm(top.norm and final_norm is not False, options.dim, options)
        self.top_shift = make_shift(top.shift)
        self.top_scale = make_scale(Learned(1.0, "scalar") if top.scale else 1.0, options.dim)
        self.output_scale = make_scale(output_factor, options.dim)

    @property
    def product_dtype(self) -> torch.dtype:
        """Of the matrix products, and so of queries, keys and values; the states between layers may be in more."""
        attention = self.attention_of_ours()
        return next(self.blocks.parameters()).dtype if attention is None else attention.output.weight.dtype

    def attention_of_ours(self) -> Attention | None:
        """The first self-attention that is no module of a user's own; None where there is none."""
        functions = (block.self_attention.f for block in self.layers())
        return next((f for f in functions if isinstance(f, Attention)), None)

    def layers(self) -> list[Block]:
        """The blocks; of one that torch.compile has wrapped, the block inside."""
        return [cast("Block", getattr(block, "_orig_mod", block)) for block in self.blocks]

    def sublayers(self) -> list[Sublayer]:
        """All sublayers in the order of the forward."""
        return [sublayer for block in self.layers() for sublayer in block.sublayers()]

    def forward(
        self,
        inputs: Sequences,
        *,
        memory: Sequences | None = None,
        cache: Cache | None = None,
        hidden_states: bool = False,
        attention_weights: bool = False,
    ) -> StackOutput:
        """Run the layers over embedded sequences; `memory` is the encoder's output, `cache` what was read before."""
        if cache is not None and len(cache.layers) != len(self.blocks):
            raise InputError(
                f"a cache of {len(cache.layers)} layers for a {self.side} of {len(self.blocks)}",
                fix="make it by this model's new_cache(capacity=...)",
            )
        x, view = self.look(inputs, memory, cache)
        run = self._run_with_weights if attention_weights else self.run
        out = run(x, view, cache.layers if cache else None, hidden_states=hidden_states)
        if cache is not None:
            cache.advance(inputs.states.shape[1])
        return out

    def look(self, inputs: Sequences, memory: Sequences | None, cache: Cache | None) -> tuple[Tensor, View]:
        """The input with its positions, and what the layers see besides it."""
        placed = place(self.positions, inputs, cache, causal=self.side == "decoder")
        x = self.dropout(self.enter(inputs.states, placed.places))
        view = make_view(
            self.positions,
            placed,
            self.product_dtype,
            past=cache.length if cache else 0,
            memory=None if memory is None else memory.states,
            memory_mask=None if memory is None else mask_of_memory(inputs, memory),
            real=inputs.real,
        )
        return x, view

    def enter(self, embedded: Tensor, places: Tensor) -> Tensor:
        """Embeddings [batch, length, dim] at places, int [1 or batch, length], to what the first layer reads."""
        return self.input_norm(self.positions.at_input(embedded, places))

    def run(
        self, x: Tensor, view: View, caches: Sequence[KeyCache] | None = None, *, hidden_states: bool = False
    ) -> StackOutput:
        """The layers, and what stands on top, over [batch, length, dim] that has its positions."""
        kept, routing, history = [x], [], self.stream.begin(x)
        for index, block in enumerate(self.blocks):
            y, layer_routing = block(self.stream.read(history, index), view, caches[index] if caches else None)
            history = self.stream.write(history, y)
            kept += [state_of(y)] if hidden_states else []
            routing += [layer_routing] if layer_routing is not None else []
        states = self.top(self.stream.end(history))
        return StackOutput(states, tuple(kept) if hidden_states else None, tuple(routing) or None)

    def _run_with_weights(
        self, x: Tensor, view: View, caches: Sequence[KeyCache] | None = None, *, hidden_states: bool = False
    ) -> StackOutput:
        """As `run`, by the plain layers in every form of a stack, with the weights of their attention."""
        own: list[Tensor] = []
        cross: list[Tensor] | None = None
        seen = replace(view, mask=replace(view.mask, weights=own))
        if view.memory_mask is not None:
            cross = []
            seen = replace(seen, memory_mask=replace(view.memory_mask, weights=cross))
        out = Stack.run(self, x, seen, caches, hidden_states=hidden_states)
        return replace(
            out,
            attention=self._by_layer(Kind.SELF_ATTENTION, own),
            cross_attention=None if cross is None else self._by_layer(Kind.CROSS_ATTENTION, cross),
        )

    def _by_layer(self, kind: Kind, weights: list[Tensor]) -> AttentionWeights:
        ours = [isinstance(getattr(block, kind).f, Attention) for block in self.layers()]
        if len(weights) != sum(ours):
            raise InputError(
                f"{len(weights)} of {sum(ours)} layers gave the weights of their {kind}",
                fix="an attention of your own that extends ours gives them by calling its `mix`",
            )
        rest = iter(weights)
        return tuple(next(rest) if present else None for present in ours)

    def top(self, x: Tensor) -> Tensor:
        """What the recipe puts on top of the last layer."""
        return self.output_scale(self.top_scale(self.top_shift(self.top_norm(x))))
