"""Padding as Transformers tells it."""

from __future__ import annotations

from torch import Tensor

from kilolayer.errors import InputError


def real_positions(attention_mask: Tensor | None, past: int, length: int) -> tuple[Tensor | None, Tensor | None]:
    """What is no padding of `past` positions that were read and of `length` new ones: bool [batch, positions] each.

    attention_mask: of all of them, not 0 where there is no padding. None where it says nothing, or that nothing is padding.
    """
    if attention_mask is None:
        return None, None
    if attention_mask.dim() != 2 or attention_mask.shape[1] != past + length:
        raise InputError(
            f"attention_mask has shape {list(attention_mask.shape)}", fix=f"allowed: [batch, length], here {past + length} long"
        )
    real = attention_mask != 0
    # Without a mask attention is quicker. Only the CPU is asked: an accelerator would wait.
    if real.device.type == "cpu" and bool(real.all()):
        return None, None
    return real[:, :past], real[:, past:]
