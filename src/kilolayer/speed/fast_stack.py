"""A stack whose layers run by fused operators, and are compiled for training."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from kilolayer.layers.block import Block, MultiwayBlock
from kilolayer.layers.cache import Cache, KeyCache
from kilolayer.layers.context import AttentionContext, Sequences
from kilolayer.layers.norms.base import Norm
from kilolayer.layers.routing import Routing
from kilolayer.layers.stack import Stack, StackOutput
from kilolayer.layers.stream import Latest
from kilolayer.models.sharded import call_as, is_shard, is_unit, plain_class
from kilolayer.speed.compiler import (
    LayerKind,
    Recompute,
    RunLayer,
    compile_in_parts,
    compile_layer,
    compiler_settings,
    function_of,
    kind_of,
    recomputed,
)
from kilolayer.speed.fast_context import FastContext, fast_context
from kilolayer.speed.fast_layer import DRAWS, needs_dropout_seeds
from kilolayer.speed.fast_multiway import Following, Ways, first_state_of, mode_of, opening_norms, part_at, ways_of
from kilolayer.speed.inspection import LAYERS, Inspection, global_hook
from kilolayer.speed.operators import kernels
from kilolayer.speed.operators.short_attention import can_run_short_attention
from kilolayer.speed.shared_experts import shares_experts
from kilolayer.speed.state import State

logger = logging.getLogger(__name__)


class FastStack(Stack):
    """A stack with the modules of a plain one, which runs each layer in the fastest form that supports it."""

    recompute: Recompute
    compiled: dict[LayerKind, RunLayer]
    _inspections: dict[int, Inspection]
    _ways: dict[int, tuple[Inspection, tuple[bool, ...], Ways]]
    _logged: set[str]

    @classmethod
    def of(cls, stack: Stack, recompute: Recompute = "none") -> Self:
        """A second stack that shares all modules of `stack`, with their parameters and hooks."""
        fast = cls.__new__(cls)
        fast.__dict__.update(stack.__dict__)
        fast.recompute, fast.compiled = recompute, {}
        fast._inspections, fast._ways, fast._logged = {}, {}, set()
        return fast

    def compile(self, backend: str = "inductor") -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compile the layers for training, once per kind of layer and for all batch shapes, with the current `recompute`."""
        kinds = {kind_of(block) for block in self.layers() if plain_class(block) in LAYERS}
        kinds |= {(Block, False)} if self.split is not None else set()  # for sequences of one modality
        shared = {kind_of(block) for block in self.layers() if shares_experts(block)}
        of_shards = is_unit(self.blocks[0])
        self.compiled = {
            kind: compile_in_parts(kind, self.recompute, backend, of_shards=of_shards)
            if kind in shared
            else compile_layer(kind, self.recompute, backend)
            for kind in kinds
        }

    def prepare_inputs(self, inputs: Sequences, memory: Sequences | None, cache: Cache | None) -> tuple[Tensor, FastContext]:
        x, context = super().prepare_inputs(inputs, memory, cache)
        short = cache is None and self._is_short(inputs, memory)
        fast = fast_context(
            context,
            self.product_dtype,
            inputs,
            memory,
            short=short,
            causal=self.side == "decoder",
            cached=cache is not None,
        )
        return x, fast

    def run(
        self, x: Tensor, context: AttentionContext, caches: Sequence[KeyCache] | None = None, *, hidden_states: bool = False
    ) -> StackOutput:
        if not isinstance(context, FastContext):  # with a mask of the caller's own, which the operators do not support
            return super().run(x, context, caches, hidden_states=hidden_states)
        kept, routing, history = [x], [], self.stream.begin(x)
        reasons = self._why_plain()
        blocks = self._layers_for(context, x.shape[1], reasons)
        following, seeds = self._norms_that_follow(blocks, reasons), self._draw_seeds(reasons, x.device)
        state = State.of(x)
        if reasons[0] is None:
            state = first_state_of(blocks[0], x, self.product_dtype, following[-1], context.split)
        of_shards = is_unit(self.blocks[0])
        with compiler_settings(self.recompute, of_shards=of_shards) if self.compiled else nullcontext():
            for index, block in enumerate(blocks):
                if not isinstance(self.stream, Latest):
                    state = State.of(self.stream.read(history, index))
                run = self._form_of(index, block, reasons[index], caches)
                own = None if seeds is None else seeds[index]
                read = self.view_of_layer(context, index)
                state, found = run(block, state, read, caches[index] if caches else None, following[index], own)
                # A layer that keeps only its input is given one tensor instead of two.
                state = State.of(state.unwrapped) if self.recompute == "layer" else state
                history = self.stream.write(history, state.unwrapped)
                kept += [state.precise] if hidden_states else []
                routing += [found] if found is not None else []
        states = self.top(self.stream.end(history))
        return StackOutput(states, tuple(kept) if hidden_states else None, tuple(routing) or None)

    def _form_of(self, index: int, block: Block | Ways, reason: str | None, caches: Sequence[KeyCache] | None) -> RunLayer:
        """The function that runs a layer: compiled, by operators, or the plain module, for a reason that is logged."""
        trains = self.blocks.training and caches is None
        if reason is not None and reason not in self._logged:
            self._logged.add(reason)
            logger.warning("layers of the %s run as plain modules, because %s", self.side, reason)
        if reason is not None or not self._has_operators():
            return recomputed(_run_plain, self.recompute) if trains else _run_plain
        run, compiled = function_of(kind_of(block)), self.compiled.get(kind_of(block))
        if trains:
            run = recomputed(run, self.recompute) if compiled is None else compiled
        layer = self.blocks[index]
        return partial(_run_gathered, run, layer) if is_unit(layer) else run

    def _has_operators(self) -> bool:
        """Whether layers are run by operators here, and not as plain modules."""
        return bool(self.compiled) or kernels.available_on(next(self.blocks.parameters()).device)

    def _layers_for(self, context: FastContext, length: int, reasons: list[str | None]) -> list[Block | Ways]:
        """What each layer is for sequences of this length: a block, or the layers of two modalities that operators run."""
        if self.split is None or not self._has_operators():
            return [cast("Block", block) for block in self.blocks]
        layers = enumerate(zip((cast("Block", block) for block in self.blocks), reasons, strict=True))
        return [block if reason else part_at(self._ways_of(at, block), context.split, length) for at, (block, reason) in layers]

    def _ways_of(self, index: int, block: Block) -> Ways:
        """The layers of the two modalities, made anew when the block's modules or their modes have changed."""
        assert isinstance(block, MultiwayBlock)
        known, inspection, mode = self._ways.get(index), self._inspection(index, block), mode_of(block)
        if known is None or known[:2] != (inspection, mode):
            known = self._ways[index] = (inspection, mode, ways_of(block))
        return known[2]

    def _why_plain(self) -> list[str | None]:
        """For each layer, why it must run as a plain module; None where its fast form may."""
        on_all = global_hook()
        return [on_all or self._inspection(index, block).reason() for index, block in enumerate(self.blocks)]

    def _inspection(self, index: int, block: nn.Module) -> Inspection:
        """The inspection of the layer in its current state."""
        found = self._inspections.get(index)
        if found is None or found.layer is not block or not found.is_current:
            found = self._inspections[index] = Inspection(block)
        return found

    def _norms_that_follow(self, blocks: list[Block | Ways], reasons: list[str | None]) -> list[Following]:
        """For each layer, the first norm of the next one; None if the next one reads more than the output of this one, or
        gathers that norm only when it runs.

        The last layer, and a layer below one that runs as a plain module, get the first norm available. Its result is not
        used, but all layers then have the same form and share one compiled layer.
        """
        if self.recompute == "layer" or not isinstance(self.stream, Latest) or self._gathers_norms():
            return [None] * len(self.blocks)
        served = {index: block for index, block in enumerate(blocks) if reasons[index] is None}
        norms = {index: opening_norms(block) for index, block in served.items()}
        spare = next((norm for norm in norms.values() if norm is not None), None)
        return [norms.get(index, spare) for index in range(1, len(self.blocks) + 1)]

    def _gathers_norms(self) -> bool:
        """Whether FSDP2 shards the norms too, as `kl.fully_shard` does, and not matrices alone."""
        first = self.blocks[0]
        norms = (module for module in first.modules() if isinstance(module, Norm)) if is_unit(first) else ()
        return any(is_shard(weight) for norm in norms for weight in norm.parameters())

    def _draw_seeds(self, reasons: list[str | None], device: torch.device) -> Tensor | None:
        """Draw the dropout seeds of a forward pass: int64 [layers, sublayers, DRAWS]; None without dropout.

        They come from torch's generator, which gives new numbers at each replay of a CUDA graph and is saved in checkpoints.
        """
        fast = [(index, cast("Block", block)) for index, block in enumerate(self.blocks) if reasons[index] is None]
        if not any(needs_dropout_seeds(self._inspection(index, block).drops) for index, block in fast):
            return None
        return torch.randint(2**62, (len(self.blocks), len(fast[0][1].sublayers()), DRAWS), device=device)

    def _is_short(self, inputs: Sequences, memory: Sequences | None) -> bool:
        """Whether short_attention.py can be used for all attention in this forward pass."""
        if inputs.segments is not None or self.positions.rotary is not None or self.positions.bias is not None:
            return False
        longest = max(inputs.states.shape[1], 0 if memory is None else memory.states.shape[1])
        attention, device = self.attention_of_ours(), inputs.states.device
        return attention is not None and can_run_short_attention(device, self.product_dtype, longest, attention.head_dim)


def _run_gathered(run: RunLayer, layer: nn.Module, block: Block | Ways, x: State, *inputs: Any) -> tuple[State, Routing | None]:
    """`run` in a call of the layer, around which FSDP2's hooks gather its matrices and divide their gradients."""
    # The hooks replace the tensors of what they see one by one: two that are the same would become different ones.
    twice = x.rounded is x.precise

    def forward(x: State) -> tuple[State, Routing | None]:
        return run(block, x._replace(rounded=x.precise) if twice else x, *inputs)

    return call_as(layer, forward, x._replace(rounded=None) if twice else x)


def _run_plain(
    block: Block, x: State, context: AttentionContext, cache: KeyCache | None, following: nn.Module | None, seeds: Tensor | None
) -> tuple[State, Routing | None]:
    """As `run_layer`, but with the plain module."""
    states, routing = block(x.unwrapped, context, cache)
    return State.of(states), routing
