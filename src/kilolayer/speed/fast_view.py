"""What layers see, in the forms that kernels take."""

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
    """A view, and what kernels take in the place of its masks.

    source: the encoder's output, rounded once. short: all attention of this forward is over sequences that one program holds
    whole; then padding is a bias on keys, [batch, keys] each. step: the view is that of one decoding step on entries of fixed
    size, and the masks' values are bool.
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
    """The form of `view` for products in `dtype`; cached: layers keep the keys of the source at the first step."""
    # Layers with a cache read the memory at the first step alone; to round it at each would be work for nothing.
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
    """[batch, keys]: 0 at real positions, -inf at padding; None where there is none."""
    real = sequences.real
    if real is None:
        return None
    return torch.zeros(real.shape, dtype=dtype, device=real.device).masked_fill_(~real, float("-inf"))


def _aligned(mask: Mask) -> Mask:
    """The same float bias, its rows at multiples of 16 elements: fused kernels would copy it in every layer otherwise.

    There is always a gap between rows, so that a compiled layer sees one layout for all lengths.
    """
    if mask.values is None or mask.values.dtype == torch.bool:
        return mask
    keys = mask.values.shape[-1]
    return Mask(values=F.pad(mask.values, (0, 16 - keys % 16))[..., :keys])
