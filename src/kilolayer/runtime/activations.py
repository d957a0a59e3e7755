"""What a layer keeps for the backward pass, found by a forward pass on the meta device, where nothing is allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kilolayer.layers.block import Block
from kilolayer.layers.context import Sequences
from kilolayer.layers.stack import Stack


@dataclass(frozen=True)
class Kept:
    """Bytes that a layer keeps for the backward pass, and those of masks and tables, which all layers share.

    largest: of the largest tensor in `layer`. drawn: the part of `layer` that a recomputed layer keeps too, because it holds
    random numbers that are not drawn again.
    """

    layer: int
    shared: int
    largest: int
    drawn: int = 0


def kept_by_plain_layer(stack: Stack, block: Block, inputs: Sequences, memory: Sequences | None) -> Kept:
    """What a layer of the stack keeps. Recomputed, it draws its random numbers again, from the same state."""
    with AsWithData():
        x, context = stack.prepare_inputs(inputs, memory, None)
        state = stack.stream.read(stack.stream.begin(x), 0)
        masks = [mask.values for mask in (context.mask, context.memory_mask) if mask is not None]
        tables = [] if context.rotation is None else [context.rotation.cos, context.rotation.sin, context.rotation.decay]
        shared = [tensor for tensor in (*masks, *tables) if tensor is not None]
        kept = kept_sizes(lambda: block(state, context, None), block, inputs, memory, shared)
        return Kept(sum(kept), bytes_of(shared), max(kept))


def kept_sizes(
    run: Callable[[], Any], block: nn.Module, inputs: Sequences, memory: Sequences | None = None, shared: Iterable[Tensor] = ()
) -> list[int]:
    """Bytes of each tensor that `run` keeps for the backward pass, except for weights, padding, the encoder's output, and what
    is shared."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    given = [*block.parameters(), *block.buffers(), *shared, *([] if inputs.real is None else [inputs.real])]
    given += [] if memory is None else [memory.states]
    others = {tensor.untyped_storage()._cdata for tensor in given}
    kept = {storage._cdata: storage.nbytes() for tensor in saved if (storage := tensor.untyped_storage())._cdata not in others}
    return list(kept.values())


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The size of what the tensors are stored in."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


class AsWithData(TorchFunctionMode):
    """Makes a layer on the meta device keep what it keeps where there is data.

    Attention would keep its score matrix there, which torch's fused kernels do not. The rows of each expert cannot be read
    there; what is kept of them does not depend on how they are divided.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _KeptByAttention.apply(*args)
        if func is Tensor.tolist and args[0].is_meta:
            return [0] * len(args[0])
        return func(*args, **(kwargs or {}))


class _KeptByAttention(torch.autograd.Function):
    """Attention that keeps queries, keys, values, the output, and one fp32 number per head and query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out
