"""Convert Transformers' attention masks."""

from __future__ import annotations

from torch import Tensor

from kilolayer.errors import InputError


def real_positions(attention_mask: Tensor | None, past: int, length: int) -> tuple[Tensor | None, Tensor | None]:
    """Which of `past` cached and `length` new positions are not padding: bool [batch, positions] each.

    attention_mask: for all of these positions, 0 at padding. None if there is no mask, or nothing is padding.
    """
    if attention_mask is None:
        return None, None
    if attention_mask.dim() != 2 or attention_mask.shape[1] != past + length:
        raise InputError(
            f"attention_mask has shape {list(attention_mask.shape)}", fix=f"allowed: [batch, length], here {past + length} long"
        )
    real = attention_mask != 0
    # Attention is faster without a mask. Checked only on the CPU: a GPU would have to synchronize.
    if real.device.type == "cpu" and bool(real.all()):
        return None, None
    return real[:, :past], real[:, past:]
