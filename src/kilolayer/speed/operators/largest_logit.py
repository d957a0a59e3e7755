"""The largest attention logit as one operator, so that a compiled layer takes the loop over blocks of queries as it is."""

from __future__ import annotations

import torch
from torch import Tensor

from kilolayer.layers import attention
from kilolayer.layers.mask import Mask


def measure_largest_logit(query_BHLD: Tensor, key_BHLD: Tensor, mask: Mask) -> None:
    """As `record_largest_logit` of layers/attention.py."""
    assert mask.largest_logit is not None
    values = None if mask.values is None else mask.values.detach()
    _record(query_BHLD.detach(), key_BHLD.detach(), values, mask.causal, mask.real, mask.largest_logit)


@torch.library.custom_op("kilolayer::record_largest_logit", mutates_args=("largest_logit",))
def _record(
    query: Tensor, key: Tensor, values: Tensor | None, causal: bool, real: Tensor | None, largest_logit: Tensor
) -> None:
    attention.record_largest_logit(query, key, Mask(causal, values, largest_logit=largest_logit, real=real))
