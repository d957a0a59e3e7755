"""The view of layers/view.py in the form that kernels take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer.layers.mask import Mask
from kilolayer.layers.view import Sequences, View
from kilolayer.speed.memory import Memory


@dataclass(frozen=True)
class FastView(View):
    """A view with additional inputs for kernels.

    source: the encoder's output, rounded once for all layers. short: all attention is over sequences short enough for
    short_attention.py; padding is then given as a bias on keys, [batch, keys] each. step: the view is that of a decoding step
    with a static cache, and the masks are bool.
    """

    source: Memory | None = None
    short: bool = False
    causal: bool = False
    key_bias: Tensor | None = None
    source_key_bias: Tensor | None = None
    step: bool = False


def fast_view(
    view: View, dtype: torch.dtype, inputs: Sequences, memory: Sequences | None, *, short: bool, causal: bool, cached: bool
) -> FastView:
    """Build the fast form of `view` for products in `dtype`; cached: layers cache the keys of the source at the first step."""
    # Layers with a cache read the encoder's output only at the first step; rounding it at every step would be wasted.
    source = None if memory is None or view.memory is None else Memory.of(view.memory, view.memory.dtype if cached else dtype)
    return FastView(
        mask=_aligned(view.mask),
        rotation=view.rotation,
        past=view.past,
        memory=view.memory,
        memory_mask=None if view.memory_mask is None else _aligned(view.memory_mask),
        real=view.real,
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
