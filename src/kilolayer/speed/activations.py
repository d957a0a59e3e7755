"""What a layer keeps for the backward pass if it is run by fused operators and compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.layers.block import Block, MultiwayBlock
from kilolayer.layers.context import Sequences
from kilolayer.layers.stack import Stack
from kilolayer.layers.stream import Latest
from kilolayer.runtime.activations import AsWithData, Kept, bytes_of, kept_sizes
from kilolayer.speed.compiler import function_of, kind_of
from kilolayer.speed.fast_context import FastContext
from kilolayer.speed.fast_layer import DRAWS, needs_dropout_seeds
from kilolayer.speed.fast_multiway import first_state_of, opening_norms, part_at, ways_of
from kilolayer.speed.fast_stack import FastStack
from kilolayer.speed.operators import kernels
from kilolayer.speed.state import State


def kept_by_fast_layer(plain: Stack, block: Block, inputs: Sequences, memory: Sequences | None) -> Kept:
    """What a layer of the stack keeps for the backward pass."""
    stack, x = FastStack.of(plain), inputs.states
    with kernels.assumed(), AsCompiled() as compiled:
        _, context = stack.prepare_inputs(inputs, memory, None)
        layer = part_at(ways_of(block), context.split, x.shape[1]) if isinstance(block, MultiwayBlock) else block
        run = function_of(kind_of(layer))
        # Layers of the same kind are alike: the layer before this one prepares its input as this one does for the next.
        following = opening_norms(layer) if isinstance(stack.stream, Latest) else None
        if isinstance(stack.stream, Latest):
            state = first_state_of(layer, x, stack.product_dtype, following, context.split)
        else:
            state = State.of(stack.stream.read(stack.stream.begin(x), 0))
        seeds = (
            torch.empty(len(block.sublayers()), DRAWS, device="meta", dtype=torch.int64)
            if needs_dropout_seeds(block.modules())
            else None
        )
        shared = list(_tensors(context))
        kept = kept_sizes(lambda: run(layer, state, context, None, following, seeds), block, inputs, memory, shared)
    return Kept(sum(kept), bytes_of(shared), max(kept), compiled.drawn)


class AsCompiled(AsWithData):
    """Makes operations on the meta device keep the same tensors for the backward pass as fused kernels and compiled code.

    Without it, dropout would keep a mask of floats.
    drawn: bytes of what torch's attention has drawn random numbers for, which the compiler is told to keep.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drawn = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.dropout and kwargs and kwargs.get("training") and kwargs.get("p"):
            return _CompiledDropout.apply(args[0])
        result = super().__torch_function__(func, types, args, kwargs)
        if func is F.scaled_dot_product_attention and kwargs and kwargs.get("dropout_p"):
            self.drawn += result.nbytes + result[..., 0].numel() * torch.float32.itemsize
        return result


class _CompiledDropout(torch.autograd.Function):
    """Dropout that keeps its mask with one byte per element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)


def _tensors(context: FastContext) -> Iterator[Tensor]:
    """The tensors that all layers of a stack share and keep: masks, rotary tables, and the encoder's output if it is rounded.

    If it is not rounded, it is already counted as an activation of the encoder.
    """
    masks = [context.key_bias, context.source_key_bias]
    if not context.short:
        masks = [mask.values for mask in (context.mask, context.memory_mask) if mask is not None]
    tables = [] if context.rotation is None else [context.rotation.cos, context.rotation.sin, context.rotation.decay]
    rounded = [] if context.source is None or context.source.rounded is context.source.precise else [context.source.rounded]
    yield from (tensor for tensor in (*masks, *tables, *rounded) if tensor is not None)
