"""Layers that keep less for the backward pass and compute the rest again.

Run one operation at a time they do it by torch's checkpoints, and compiled by the compiler's own plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import fx
from torch._functorch import config as partition_config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import kilolayer.operators.grouped
import kilolayer.operators.short_attention  # noqa: F401, registers its operators
from kilolayer.layers.block import LayerOutput

Recompute = Literal["none", "selective", "layer"]

# Shares of what a compiled layer would keep. At 0 the compiler keeps inputs alone, whatever is marked to be kept.
BUDGETS: dict[Recompute, float] = {"none": 1.0, "selective": 0.5, "layer": 0.0}
LEAST = 1e-6

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


@functools.cache
def draws_are_kept() -> Any:
    """A pass of the compiler over a layer's graph, forward and backward: what is drawn at random is kept.

    Within its budget the compiler computes anything again, and a second draw would be another one: wrong gradients.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class DrawsAreKept(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            for node in graph.nodes:
                if _draws(node):
                    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
                    node.meta["memory_budget"] = max(partition_config.activation_memory_budget, LEAST)

        def uuid(self) -> bytes:
            return get_hash_for_files((__file__,))

    return DrawsAreKept()


def _draws(node: fx.Node) -> bool:
    operation = node.target
    if not isinstance(operation, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    names = [argument.name for argument in operation._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" not in names or bool(given.get("dropout_p", 0.0) != 0.0)
