"""The context of layers/context.py in the form that kernels take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.layers.context import AttentionContext, Sequences
from kilolayer.layers.mask import Mask
from kilolayer.speed.memory import Memory


@dataclass(frozen=True)
class FastContext(AttentionContext):
    """A context with additional inputs for kernels.

    source: the encoder's output, rounded once for all layers. short: all attention is over sequences short enough for
    short_attention.py; padding is then given as a bias on keys, [batch, keys] each. step: the context is that of a decoding
    step with a static cache, and the masks are bool.
    """

    source: Memory | None = None
    short: bool = False
    causal: bool = False
    key_bias: Tensor | None = None
    source_key_bias: Tensor | None = None
    step: bool = False


def fast_context(
    context: AttentionContext,
    dtype: torch.dtype,
    inputs: Sequences,
    memory: Sequences | None,
    *,
    short: bool,
    causal: bool,
    cached: bool,
) -> FastContext:
    """The fast form of `context` for products in `dtype`; cached: layers cache the keys of the source at the first step."""
    # Layers with a cache read the encoder's output only at the first step; rounding it at every step would be wasted.
    source = (
        None
        if memory is None or context.memory is None
        else Memory.of(context.memory, context.memory.dtype if cached else dtype)
    )
    return FastContext(
        mask=_aligned(context.mask),
        rotation=context.rotation,
        past=context.past,
        memory=context.memory,
        memory_mask=None if context.memory_mask is None else _aligned(context.memory_mask),
        real=context.real,
        split=context.split,
        source=source,
        short=short,
        causal=causal,
        key_bias=_key_bias(inputs, dtype) if short else None,
        source_key_bias=_key_bias(memory, dtype) if short and memory is not None else None,
    )


def _key_bias(sequences: Sequences, dtype: torch.dtype) -> Tensor | None:
    """[batch, keys]: 0 at real positions, -inf at padding; None if nothing is padded."""
    real = sequences.real
    if real is None:
        return None
    return torch.zeros(real.shape, dtype=dtype, device=real.device).masked_fill_(~real, float("-inf"))


def _aligned(mask: Mask) -> Mask:
    """The same float bias with rows aligned to 16 elements, because fused kernels would otherwise copy it in every layer.

    There is always a gap between rows, so that a compiled layer sees the same layout for all lengths.
    """
    if mask.values is None or mask.values.dtype == torch.bool:
        return mask
    keys = mask.values.shape[-1]
    return Mask(values=F.pad(mask.values, (0, 16 - keys % 16))[..., :keys])
