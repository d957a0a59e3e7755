"""Layers that keep less for the backward pass and compute the rest again, one operation at a time.

A compiled layer does the same by the compiler's own plan.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import kilolayer.layers.grouped
import kilolayer.layers.short_attention  # noqa: F401, registers its operators
from kilolayer.layers.block import LayerOutput

Recompute = Literal["none", "selective", "layer"]

ops = torch.ops.aten
PRODUCTS = {ops.mm.default, ops.addmm.default}
GROUPED_PRODUCT = torch.ops.kilolayer.grouped_product.default
CHOICES = {ops.topk.default, ops.sort.stable}  # of experts: what is computed again must go to the same ones
ATTENTION = {
    ops._scaled_dot_product_flash_attention_for_cpu.default,
    ops._scaled_dot_product_flash_attention.default,
    ops._scaled_dot_product_efficient_attention.default,
    ops._scaled_dot_product_cudnn_attention.default,
    torch.ops.kilolayer.short_self_attention.default,
    torch.ops.kilolayer.short_cross_attention.default,
}


def recomputed(run: Callable[..., LayerOutput], what: Recompute) -> Callable[..., LayerOutput]:
    """`run` of a layer, keeping its input alone ("layer"), or also what attention and narrowing products gave ("selective")."""
    if what == "none":
        return run
    if what == "layer":
        return partial(checkpoint, run, use_reentrant=False)
    return partial(checkpoint, run, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, _choose))


def _choose(_: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    kept = operation in ATTENTION or operation in CHOICES
    # A product that widens, into the feed-forward network or into queries, keys and values, holds most of the memory.
    if operation in PRODUCTS:
        inner, columns = arguments[-1].shape
        kept = columns <= inner
    elif operation is GROUPED_PRODUCT:
        _, columns, inner = arguments[1].shape
        kept = columns <= inner
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
