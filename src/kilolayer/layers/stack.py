"""A stack of layers: positions at its input, blocks, and what the recipe puts on top."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kilolayer.errors import InputError, OptionError
from kilolayer.layers.block import Block, CrossBlock, View
from kilolayer.layers.cache import Cache
from kilolayer.layers.mask import cross_mask, self_mask
from kilolayer.layers.norm import make_norm
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.position import Positions, position_ids
from kilolayer.layers.scale import make_scale, make_shift
from kilolayer.layers.stream import make_stream
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
    """states [batch, length, dim], and, on request, the embedded input and the output of each layer."""

    states: Tensor
    hidden_states: tuple[Tensor, ...] | None


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
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.side: Side = side
        top = recipe.top(side, depths)
        if final_norm and not top.norm:
            raise OptionError(
                f"final_norm=True contradicts the recipe {recipe.name!r}, which has no final norm",
                fix="remove final_norm, or choose a Pre-LN recipe",
            )
        kind = CrossBlock if side == "decoder" and depths.paired else Block
        self.positions = Positions(options, side, device, dtype)
        self.dropout = nn.Dropout(options.dropout) if options.dropout else nn.Identity()
        self.blocks = nn.ModuleList(
            kind(options, recipe, side, layer, depths, device, dtype) for layer in range(1, depths.of(side) + 1)
        )
        self.stream = make_stream(recipe.stream(), len(self.blocks), options, device, dtype)
        self.top_norm = make_norm(top.norm and final_norm is not False, options.dim, options, device, dtype)
        self.top_shift = make_shift(top.shift, device, dtype)
        self.top_scale = make_scale(Learned(1.0, "scalar") if top.scale else 1.0, options.dim, device, dtype)

    def forward(
        self, inputs: Sequences, *, memory: Sequences | None = None, cache: Cache | None = None, hidden_states: bool = False
    ) -> StackOutput:
        """Run the layers over embedded sequences; `memory` is the encoder's output, `cache` what was read before."""
        view, x = self._look(inputs, memory, cache)
        kept = [x]
        history = self.stream.write([], x)
        for index, block in enumerate(self.blocks):
            x = block(self.stream.read(history), view, cache.layers[index] if cache else None)
            history = self.stream.write(history, x)
            if hidden_states:
                kept.append(x)
        if cache is not None:
            cache.length += inputs.states.shape[1]
        states = self.top_scale(self.top_shift(self.top_norm(self.stream.read(history))))
        return StackOutput(states, tuple(kept) if hidden_states else None)

    def _look(self, inputs: Sequences, memory: Sequences | None, cache: Cache | None) -> tuple[View, Tensor]:
        """What the layers see, and the input with its positions."""
        x, segments = inputs.states, inputs.segments
        length, device = x.shape[1], x.device
        past = cache.length if cache else 0
        self.positions.check_length(past + length)
        if cache is not None and segments is not None:
            raise InputError("packed documents cannot be decoded step by step", fix="give each document its own row")
        real = cache.extend(length, inputs.real) if cache else inputs.real
        places = position_ids(length, device=device, real=real, segments=segments, past=past)
        mask = self_mask(length, causal=self.side == "decoder", device=device, real=real, segments=segments, past=past)
        if self.positions.bias is not None:
            mask = mask.with_bias(self.positions.bias(length, past + length).to(x.dtype))
        rotation = None if self.positions.rotary is None else self.positions.rotary(places, x.dtype)
        x = self.dropout(self.positions.at_input(x, places))
        if memory is None:
            return View(mask, rotation, past), x
        reading = cross_mask(real=memory.real, segments=segments, memory_segments=memory.segments)
        return View(mask, rotation, past, memory.states, reading), x
