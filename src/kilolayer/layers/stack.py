"""A stack of layers: positions at its input, blocks, and what the recipe puts on top."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import cast

import torch
from torch import Tensor, nn
from torch._functorch import config as partition_config
from torch.fx.experimental import _config as shape_config

from kilolayer.errors import InputError
from kilolayer.layers.attention import Attention
from kilolayer.layers.block import Block, LayerOutput, Sparsity, View, make_block
from kilolayer.layers.cache import Cache, KeptKeys
from kilolayer.layers.mask import Mask, cross_mask, self_mask, short_mask
from kilolayer.layers.memory import Memory
from kilolayer.layers.norm import make_norm
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.position import Positions, position_ids
from kilolayer.layers.recompute import BUDGETS, Recompute, draws_are_kept, recomputed
from kilolayer.layers.routing import Routing
from kilolayer.layers.scale import make_scale, make_shift
from kilolayer.layers.state import State
from kilolayer.layers.stream import Latest, make_stream
from kilolayer.layers.sublayer import Sublayer
from kilolayer.operators.short_attention import can_run_short_attention
from kilolayer.recipes.base import Depths, Learned, Recipe, Side


@dataclass(frozen=True)
class Sequences:
    """A batch of embedded sequences.

    states [batch, length, dim]; real bool [batch, length], False at padding, None where there is none;
    segments int [batch, length], the document of each position, None where each row is one.
    """

    states: Tensor
    real: Tensor | None = None
    segments: Tensor | None = None


@dataclass(frozen=True)
class StackOutput:
    """states [batch, length, dim], and, on request, the embedded input and the output of each layer.

    routing: what each layer with experts tells; None where there is none.
    """

    states: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
    routing: tuple[Routing, ...] | None = None

    @property
    def router_loss(self) -> Tensor:
        """The sum of the layers'; 0 where none has experts."""
        if self.routing is None:
            return self.states.new_zeros(())
        return torch.stack([told.router_loss for told in self.routing]).sum()


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
        sparsity: Sparsity | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.side: Side = side
        self.compiled: dict[type[nn.Module], Callable[..., LayerOutput]] | None = None
        self.recompute: Recompute = "none"
        self.residuals: list[Tensor] | None = None
        """A list that the root mean square of each layer's output goes to, where someone wants to know it."""
        top = recipe.top(side, depths)
        self.positions = Positions(options, side, device, dtype)
        self.dropout = nn.Dropout(options.dropout) if options.dropout else nn.Identity()
        self.blocks = nn.ModuleList(
            make_block(options, recipe, side, layer, depths, device, dtype, sparsity) for layer in range(1, depths.of(side) + 1)
        )
        if first_eps is not None:
            self.sublayers()[0].set_out_eps(first_eps)
        self.stream = make_stream(recipe.stream(), len(self.blocks), options, device, dtype)
        self.top_norm = make_norm(top.norm and final_norm is not False, options.dim, options, device, dtype)
        self.top_shift = make_shift(top.shift, device, dtype)
        self.top_scale = make_scale(Learned(1.0, "scalar") if top.scale else 1.0, options.dim, device, dtype)

    @property
    def product_dtype(self) -> torch.dtype:
        """Of the matrix products, and so of queries, keys and values; the states between layers may be in more."""
        return self.attention.output.weight.dtype

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether shapes inside the layers follow from those of their input; not so where processes share experts."""
        return all(map(_has_fixed_shapes, self.blocks))

    @property
    def attention(self) -> Attention:
        """The first layer's: all layers have the same sizes."""
        attention = self._first.self_attention.f
        assert isinstance(attention, Attention)
        return attention

    @property
    def _first(self) -> Block:
        return _look_into(self.blocks[0])

    def compile_layer(self, backend: str = "inductor") -> None:
        """Compile the layers' forward, once for all of a kind and all batch shapes, for training with `recompute` as it is.

        Layers that share experts with other processes find out shapes in their forward and run one operation at a time.
        """
        # A number that all layers share is a constant; sizes that happen to be equal are still two sizes.
        torch._dynamo.config.specialize_float = True
        shape_config.use_duck_shape = False
        # Layers of all models of a process count together.
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit
        partition_config.activation_memory_budget = BUDGETS[self.recompute]
        options = {"joint_custom_post_pass": draws_are_kept()} if backend == "inductor" else None
        kinds = {type(block) for block in self.blocks if _has_fixed_shapes(block)}
        self.compiled = {
            kind: torch.compile(
                _forward_of(kind, self.recompute), dynamic=True, fullgraph=True, backend=backend, options=options
            )
            for kind in kinds
        }

    def _how_to_run(self, block: nn.Module, caches: Sequence[KeptKeys] | None) -> Callable[..., LayerOutput]:
        if not self.training or caches is not None:
            return nn.Module.__call__
        compiled = None if self.compiled is None else self.compiled.get(type(block))
        return recomputed(nn.Module.__call__, self.recompute) if compiled is None else compiled

    def sublayers(self) -> list[Sublayer]:
        """All sublayers in the order of the forward."""
        return [sublayer for block in self.blocks for sublayer in _look_into(block).sublayers()]

    def forward(
        self, inputs: Sequences, *, memory: Sequences | None = None, cache: Cache | None = None, hidden_states: bool = False
    ) -> StackOutput:
        """Run the layers over embedded sequences; `memory` is the encoder's output, `cache` what was read before."""
        view, x = self._look(inputs, memory, cache)
        out = self.run(x, view, cache.layers if cache else None, hidden_states=hidden_states)
        if cache is not None:
            cache.length += inputs.states.shape[1]
        return out

    def run(
        self, x: Tensor, view: View, caches: Sequence[KeptKeys] | None = None, *, hidden_states: bool = False
    ) -> StackOutput:
        """The layers, and what stands on top, over [batch, length, dim] that has its positions."""
        kept = [x]
        routing: list[Routing] = []
        following = self._norms_that_follow()
        start = self._first.start(x, self.product_dtype, following[-1])
        history = self.stream.write([], self._hand_on(start))
        for index, block in enumerate(self.blocks):
            run = self._how_to_run(block, caches)
            state, told = run(block, self.stream.read(history), view, caches[index] if caches else None, following[index])
            if told is not None:
                routing.append(told)
            history = self.stream.write(history, self._hand_on(state))
            if self.residuals is not None:
                self.residuals.append(state.precise.detach().double().square().mean().sqrt())
            if hidden_states:
                kept.append(state.precise)
        states = self.top_scale(self.top_shift(self.top_norm(self.stream.read(history).precise)))
        return StackOutput(states, tuple(kept) if hidden_states else None, tuple(routing) or None)

    def _norms_that_follow(self) -> list[nn.Module | None]:
        """For each layer, the norm that the next one begins with; none where that one does not read just what this one wrote.

        The last layer gets the first's and normalises for nobody, so that one compiled layer serves all.
        """
        if self.recompute == "layer" or not isinstance(self.stream, Latest):
            return [None] * len(self.blocks)
        first, *others = [_look_into(block).sublayers()[0].opening for block in self.blocks]
        return [*others, first]

    def _hand_on(self, state: State) -> State:
        """What the next layer reads; where it keeps nothing but that, it is one tensor and not two."""
        return State.of(state.precise) if self.recompute == "layer" else state

    def _look(self, inputs: Sequences, memory: Sequences | None, cache: Cache | None) -> tuple[View, Tensor]:
        """What the layers see, and the input with its positions."""
        x, segments = inputs.states, inputs.segments
        length, device = x.shape[1], x.device
        past = cache.length if cache else 0
        if cache is not None and segments is not None:
            raise InputError("packed documents cannot be decoded step by step", fix="give each document its own row")
        short, dtype = self._is_short(inputs, memory, cache), self.product_dtype
        if cache is not None and cache.seen is not None:
            places, mask = self._look_along_branches(length, cache)
        else:
            real = cache.extend(length, inputs.real) if cache else inputs.real
            everywhere = position_ids(past + length, device=device, real=real, segments=segments)
            self.positions.check_length(past + length if segments is None else everywhere)
            places, causal = everywhere[:, past:], self.side == "decoder"
            if short:
                mask = short_mask(causal=causal, real=real, dtype=dtype)
            else:
                mask = self_mask(length, causal=causal, device=device, real=real, segments=segments, past=past)
            if self.positions.bias is not None:
                mask = mask.with_bias(self.positions.bias(places, everywhere))
        mask = mask.as_bias(dtype)
        rotation = None if self.positions.rotary is None else self.positions.rotary(places, dtype)
        x = self.dropout(self.positions.at_input(x, places))
        if memory is None:
            return View(mask, rotation, past, real=inputs.real), x
        if short:
            reading = short_mask(causal=False, real=memory.real, dtype=dtype)
        else:
            reading = cross_mask(real=memory.real, segments=segments, memory_segments=memory.segments).as_bias(dtype)
        # With a cache, layers read the memory at the first step alone; to round it at each would be work for nothing.
        read = Memory.of(memory.states, dtype if cache is None else memory.states.dtype)
        return View(mask, rotation, past, read, reading, inputs.real), x

    def _is_short(self, inputs: Sequences, memory: Sequences | None, cache: Cache | None) -> bool:
        """Whether short_attention.py can serve all attention of this forward."""
        plain = cache is None and inputs.segments is None and self.positions.rotary is None and self.positions.bias is None
        if not plain or (self.training and self.attention.dropout):
            return False
        longest = max(inputs.states.shape[1], 0 if memory is None else memory.states.shape[1])
        return can_run_short_attention(inputs.states.device, self.product_dtype, longest, self.attention.head_dim)

    def _look_along_branches(self, branches: int, cache: Cache) -> tuple[Tensor, Mask]:
        """Places and mask of one token for each branch of the cache."""
        self.positions.check_length(len(cache.widths) + 1)
        places, seen = cache.extend_branches(branches)
        mask = Mask(values=seen[:, None])
        if self.positions.bias is not None:
            mask = mask.with_bias(self.positions.bias(places, cache.places().to(places.device)))
        return places, mask


def _look_into(block: nn.Module) -> Block:
    """The block itself where it was compiled."""
    return cast("Block", getattr(block, "_orig_mod", block))


@functools.cache
def _forward_of(kind: type[nn.Module], recompute: Recompute) -> Callable[..., LayerOutput]:
    """The forward of this kind of layer, with code of its own: by its code the compiler finds what it has made before."""
    forward = kind.forward
    assert isinstance(forward, FunctionType)
    return FunctionType(forward.__code__.replace(), forward.__globals__, forward.__name__, forward.__defaults__)


def _has_fixed_shapes(block: nn.Module) -> bool:
    return getattr(_look_into(block).feedforward.f, "has_fixed_shapes", True)
