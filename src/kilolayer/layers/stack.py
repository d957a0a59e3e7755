"""A stack of layers: an encoder or a decoder, without embedding and vocabulary.

    x_0 = norm(embedded + positions),    x_l = block_l(x_{l-1}),    states = scale * (norm(x_L) + shift)

The recipe decides which norms, scales and shifts exist, and its stream (stream.py) can pass more than x_{l-1} to layer l.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from kilolayer.errors import InputError
from kilolayer.layers.attention import Attention
from kilolayer.layers.block import Block, Sparsity, make_block
from kilolayer.layers.cache import Cache, KeyCache
from kilolayer.layers.context import AttentionContext, Sequences, ids_at_input, make_context, mask_of_memory, number_positions
from kilolayer.layers.multiway import Split, pair_modules
from kilolayer.layers.norms.base import make_norm
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.position import Positions
from kilolayer.layers.routing import Routing
from kilolayer.layers.scale import make_scale, make_shift
from kilolayer.layers.stream import make_stream, state_of
from kilolayer.layers.sublayer import Sublayer
from kilolayer.recipes.base import NORM, Depths, Kind, Learned, Recipe, Side, norm_spec

AnyView = TypeVar("AnyView", bound=AttentionContext)
AttentionWeights = tuple[Tensor | None, ...]
"""[batch, heads, queries, keys] for each layer; None for a layer whose attention is a user's own module."""


@dataclass(frozen=True)
class StackOutput:
    """The output of a stack.

    states: [batch, length, dim], after the final norm.
    hidden_states: the embedded input and the output of each layer, [batch, length, dim] each; on request.
    routing: the routing statistics of each layer with experts; None in a dense stack.
    attention, cross_attention: the attention weights of each layer; on request.
    """

    states: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
    routing: tuple[Routing, ...] | None = None
    attention: AttentionWeights | None = None
    cross_attention: AttentionWeights | None = None

    @property
    def router_loss(self) -> Tensor:
        """The sum over all layers; 0 in a dense stack."""
        if self.routing is None:
            return self.states.new_zeros(())
        return torch.stack([layer.router_loss for layer in self.routing]).sum()


class Stack(nn.Module):
    """The layers of an encoder or a decoder: embedded sequences [batch, length, dim] to states [batch, length, dim].

    largest_logits: for each layer, two numbers fp32 [] that a forward pass raises to the largest logit of self- and
    cross-attention; None, except while they are measured.
    gathered_dtype: the dtype of matrices that several processes share, while they are gathered; None if they are not shared.
    """

    largest_logits: Sequence[tuple[Tensor, Tensor]] | None = None
    gathered_dtype: torch.dtype | None = None

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
        positions: Positions | None = None,
    ) -> None:
        """Build all layers.

        final_norm: False omits the recipe's final norm. first_eps: eps of the first norm on the residual, if it differs.
        input_norm: normalize the embedded input even if the recipe does not. output_factor: multiplies the final states.
        positions: other position encodings than those of a text.
        """
        super().__init__()
        self.side: Side = side
        top = recipe.top(side, depths)
        self.positions = Positions(options, side) if positions is None else positions
        self.input_norm = make_norm(NORM if input_norm else norm_spec(recipe.input_norm(side, depths)), options.dim, options)
        self.dropout = nn.Dropout(options.dropout) if options.dropout else nn.Identity()
        self.blocks = nn.ModuleList(
            make_block(options, recipe, side, layer, depths, sparsity) for layer in range(1, depths.of(side) + 1)
        )
        if first_eps is not None:
            self.sublayers()[0].set_out_eps(first_eps)
        self.stream = make_stream(recipe.stream(), len(self.blocks), options)
        self.top_norm = make_norm(None if final_norm is False else top.norm, options.dim, options)
        self.top_shift = make_shift(top.shift)
        self.top_scale = make_scale(Learned(1.0, "scalar") if top.scale else 1.0, options.dim)
        self.output_scale = make_scale(output_factor, options.dim)
        self.split = pair_modules(self, Split()) if options.multiway else None

    @property
    def product_dtype(self) -> torch.dtype:
        """The dtype of matrix products, and so of queries, keys and values; states between layers may be more precise."""
        if self.gathered_dtype is not None:
            return self.gathered_dtype
        attention = self.attention_of_ours()
        return next(self.blocks.parameters()).dtype if attention is None else next(attention.output.parameters()).dtype

    def attention_of_ours(self) -> Attention | None:
        """The first self-attention that is not a user's own module; None if there is none."""
        functions = (block.self_attention.f for block in self.layers())
        return next((f for f in functions if isinstance(f, Attention)), None)

    def layers(self) -> list[Block]:
        """The blocks, unwrapped where torch.compile has wrapped them."""
        return [cast("Block", getattr(block, "_orig_mod", block)) for block in self.blocks]

    def sublayers(self) -> list[Sublayer]:
        """All sublayers, in the order in which they run."""
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
        """Run the stack on embedded sequences.

        memory: the encoder's output, for a decoder that attends to it. cache: keys and values of the tokens read before.
        hidden_states, attention_weights: return them too.
        """
        if cache is not None and len(cache.layers) != len(self.blocks):
            raise InputError(
                f"a cache of {len(cache.layers)} layers for a {self.side} of {len(self.blocks)}",
                fix="make it by this model's new_cache(capacity=...)",
            )
        x, context = self.prepare_inputs(inputs, memory, cache)
        run = self._run_with_weights if attention_weights else self.run
        out = run(x, context, cache.layers if cache else None, hidden_states=hidden_states)
        if cache is not None:
            cache.advance(inputs.states.shape[1])
        return out

    def prepare_inputs(
        self, inputs: Sequences, memory: Sequences | None, cache: Cache | None
    ) -> tuple[Tensor, AttentionContext]:
        """Prepare the layers' inputs: x [batch, length, dim] with positions and dropout, and the context of all layers."""
        if self.split is not None:
            assert inputs.split is not None
            self.split.position = inputs.split
        token_positions = number_positions(self.positions, inputs, cache, causal=self.side == "decoder")
        ids = ids_at_input(self.positions, token_positions, inputs)
        x = self.dropout(self.add_positions(inputs.states, ids))
        context = make_context(
            self.positions,
            token_positions,
            self.product_dtype,
            past=cache.length if cache else 0,
            memory=None if memory is None else memory.states,
            memory_mask=None if memory is None else mask_of_memory(inputs, memory),
            real=inputs.real,
            split=inputs.split or 0,
        )
        return x, context

    def add_positions(self, embedded: Tensor, ids: Tensor) -> Tensor:
        """Add positions and apply the input norm: [batch, length, dim] to the same; ids: int [1 or batch, length]."""
        return self.input_norm(self.positions.at_input(embedded, ids))

    def run(
        self, x: Tensor, context: AttentionContext, caches: Sequence[KeyCache] | None = None, *, hidden_states: bool = False
    ) -> StackOutput:
        """Run the blocks and the final norm on x [batch, length, dim], which already has its positions."""
        kept, routing, history = [x], [], self.stream.begin(x)
        for index, block in enumerate(self.blocks):
            own = self.view_of_layer(context, index)
            y, layer_routing = block(self.stream.read(history, index), own, caches[index] if caches else None)
            history = self.stream.write(history, y)
            kept += [state_of(y)] if hidden_states else []
            routing += [layer_routing] if layer_routing is not None else []
        states = self.top(self.stream.end(history))
        return StackOutput(states, tuple(kept) if hidden_states else None, tuple(routing) or None)

    def view_of_layer(self, context: AnyView, index: int) -> AnyView:
        """The view that one layer reads: that of all layers, unless its largest logits are measured."""
        return context if self.largest_logits is None else context.recording(*self.largest_logits[index])

    def _run_with_weights(
        self, x: Tensor, context: AttentionContext, caches: Sequence[KeyCache] | None = None, *, hidden_states: bool = False
    ) -> StackOutput:
        """As `run`, but also return attention weights; a fast form of the stack uses its plain layers for this."""
        own: list[Tensor] = []
        cross: list[Tensor] | None = None
        seen = replace(context, mask=replace(context.mask, weights=own))
        if context.memory_mask is not None:
            cross = []
            seen = replace(seen, memory_mask=replace(context.memory_mask, weights=cross))
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
        """output_scale * top_scale * (norm(x) + shift), as far as the recipe has them: [batch, length, dim] to the same."""
        return self.output_scale(self.top_scale(self.top_shift(self.top_norm(x))))
