"""Layers compiled once for all of a kind, and layers that keep less for the backward pass and compute the rest again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType
from typing import Any, Literal

import torch
from torch import fx, nn
from torch._functorch import config as partition_config
from torch.fx.experimental import _config as shape_config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import kilolayer.operators.grouped
import kilolayer.operators.short_attention  # noqa: F401, registers its operators
from kilolayer.operators import kernels
from kilolayer.speed.fast_layer import run_layer

Recompute = Literal["none", "selective", "layer"]
RunLayer = Callable[..., Any]
"""As `run_layer`."""

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


@contextmanager
def compiler_settings(recompute: Recompute) -> Iterator[None]:
    """Around every call of a compiled layer, because any call may compile; afterwards the settings are as they were."""
    settings = torch._dynamo.config
    with ExitStack() as stack:
        # A number that all layers share is a constant; layers of all models of a process count together.
        limit = settings.accumulated_recompile_limit
        stack.enter_context(settings.patch(specialize_float=True, recompile_limit=limit))
        # Sizes that happen to be equal are still two sizes.
        stack.enter_context(shape_config.patch(use_duck_shape=False))  # pyright: ignore[reportAttributeAccessIssue]
        stack.enter_context(partition_config.patch(activation_memory_budget=BUDGETS[recompute]))
        yield


def compile_layer(kind: type[nn.Module], recompute: Recompute, backend: str = "inductor") -> RunLayer:
    """`run_layer` compiled for this kind of layer and all batch shapes: what differs between layers is a tensor."""
    kernels.be_constant_to_the_compiler()
    options = {"joint_custom_post_pass": draws_are_kept()} if backend == "inductor" else None
    return torch.compile(_code_of_its_own(kind, recompute), dynamic=True, fullgraph=True, backend=backend, options=options)


@functools.cache
def _code_of_its_own(kind: type[nn.Module], recompute: Recompute) -> RunLayer:
    """By the code of a function the compiler finds what it has made before; so each kind has a copy."""
    assert isinstance(run_layer, FunctionType)
    return FunctionType(run_layer.__code__.replace(), run_layer.__globals__, run_layer.__name__, run_layer.__defaults__)


def recomputed(run: RunLayer, what: Recompute) -> RunLayer:
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
