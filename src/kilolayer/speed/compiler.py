"""Compilation of layers, once per kind of layer, and activation recomputation in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx, nn
from torch._functorch import config as partition_config
from torch.fx.experimental import _config as shape_config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import kilolayer.speed.operators.grouped
import kilolayer.speed.operators.short_attention  # noqa: F401, registers its operators
from kilolayer.layers.block import Block, MultiwayBlock
from kilolayer.layers.routing import Routing
from kilolayer.layers.stream import LayerState
from kilolayer.models.sharded import plain_class
from kilolayer.moe.layer import Answered, Routed, SparseFeedForward
from kilolayer.speed.fast_context import FastContext
from kilolayer.speed.fast_layer import finish_experts, route, run_attention, run_layer
from kilolayer.speed.fast_multiway import Ways, run_ways
from kilolayer.speed.operators import kernels
from kilolayer.speed.shared_experts import ask_processes, run_arrived
from kilolayer.speed.state import State

Recompute = Literal["none", "selective", "layer"]
RunLayer = Callable[..., Any]
"""A function with the signature of `run_layer`."""
LayerKind = tuple[type[Block], bool]
"""The class of a layer, and whether it has experts: layers of one kind share one compiled function."""

# Activation memory budgets of the compiler. At 0 it keeps only the inputs, even of operations marked to be saved.
BUDGETS: dict[Recompute, float] = {"none": 1.0, "selective": 0.5, "layer": 0.0}
LEAST = 1e-6

ops = torch.ops.aten
PRODUCTS = {ops.mm.default, ops.addmm.default}
GROUPED_PRODUCT = torch.ops.kilolayer.grouped_product.default
CHOICES = {ops.topk.default, ops.sort.stable}  # the choice of experts: recomputed tokens must go to the same ones
ATTENTION = {
    ops._scaled_dot_product_flash_attention_for_cpu.default,
    ops._scaled_dot_product_flash_attention.default,
    ops._scaled_dot_product_efficient_attention.default,
    ops._scaled_dot_product_cudnn_attention.default,
    torch.ops.kilolayer.short_self_attention.default,
    torch.ops.kilolayer.short_cross_attention.default,
}


@contextmanager
def compiler_settings(recompute: Recompute, *, of_shards: bool) -> Iterator[None]:
    """A context with the compiler's settings, for every call of a compiled layer, because any call may compile.

    of_shards: the layers are units of FSDP2, whose own numbers, such as heads, the compiler would take for variables.
    """
    settings = torch._dynamo.config
    with ExitStack() as stack:
        # Python numbers are constants; the limit on recompilations counts the layers of all models of a process together.
        limit = settings.accumulated_recompile_limit
        stack.enter_context(settings.patch(specialize_float=True, specialize_int=of_shards, recompile_limit=limit))
        # Two sizes that happen to be equal must not be treated as one.
        stack.enter_context(shape_config.patch(use_duck_shape=False))  # pyright: ignore[reportAttributeAccessIssue]
        stack.enter_context(partition_config.patch(activation_memory_budget=BUDGETS[recompute]))
        yield


def compile_layer(kind: LayerKind, recompute: Recompute, backend: str = "inductor") -> RunLayer:
    """Compile the function of this kind of layer for all batch shapes; whatever differs between layers must be a tensor."""
    return _compile(function_of(kind), kind, recompute, backend)


def compile_in_parts(kind: LayerKind, recompute: Recompute, backend: str = "inductor", *, of_shards: bool) -> RunLayer:
    """Compile layers whose experts several processes share: what is before the experts, these, and what is after them.

    Between the parts rows are sent to other processes; how many is read back from the device.
    """
    # Where a layer keeps only its input, all of it is run again in the backward pass, and no part by itself.
    within: Recompute = "none" if recompute == "layer" else recompute
    first, experts, last = (_compile(part, kind, within, backend) for part in (run_to_experts, run_arrived, run_from_experts))

    def run(
        block: Block, x: State, context: FastContext, cache: None, following: nn.Module | None, seeds: Tensor | None
    ) -> tuple[State, Routing]:
        f = block.feedforward.f
        assert isinstance(f, SparseFeedForward)
        # The backward pass may run it again outside of the stack's own context.
        with compiler_settings(within, of_shards=of_shards):
            states, routed = first(block, x, context, seeds)
            answered = ask_processes(f, routed, None if seeds is None else seeds[-1, 0], experts)
            return last(block, states, routed, answered, following, seeds)

    return partial(checkpoint, run, use_reentrant=False) if recompute == "layer" else run


def run_to_experts(block: Block, x: State, context: FastContext, seeds: Tensor | None) -> tuple[LayerState, Routed]:
    """The first part of `run_layer` for a layer with experts: the state that they read, and its tokens sorted by expert."""
    x = run_attention(block, x, context, None, seeds)
    return x.unwrapped, route(block.feedforward, x, context)


def run_from_experts(
    block: Block, x: LayerState, routed: Routed, answered: Answered, following: nn.Module | None, seeds: Tensor | None
) -> tuple[State, Routing]:
    """The last part of `run_layer` for a layer with experts."""
    own = None if seeds is None else seeds[-1]
    return finish_experts(block.feedforward, State.of(x), routed, answered, following, own)


def _compile(run: RunLayer, kind: LayerKind, recompute: Recompute, backend: str) -> RunLayer:
    kernels.assume_constant_when_compiled()
    options = {"joint_custom_post_pass": save_random_numbers()} if backend == "inductor" else None
    return torch.compile(_own_copy(run, kind, recompute), dynamic=True, fullgraph=True, backend=backend, options=options)


@functools.cache
def _own_copy(run: RunLayer, kind: LayerKind, recompute: Recompute) -> RunLayer:
    """A copy of the function for each kind of layer, because the compiler's cache is keyed by a function's code object."""
    assert isinstance(run, FunctionType)
    return FunctionType(run.__code__.replace(), run.__globals__, run.__name__, run.__defaults__)


def kind_of(layer: Block | Ways) -> LayerKind:
    """The kind of a layer."""
    return (MultiwayBlock, False) if isinstance(layer, Ways) else (cast("type[Block]", plain_class(layer)), layer.is_sparse)


def function_of(kind: LayerKind) -> RunLayer:
    """The function that runs layers of a kind by operators."""
    return run_ways if kind[0] is MultiwayBlock else run_layer


def recomputed(run: RunLayer, what: Recompute) -> RunLayer:
    """`run` with recomputation: keep only its input ("layer"), or also the results of attention and narrowing products."""
    if what == "none":
        return run
    if what == "layer":
        return partial(checkpoint, run, use_reentrant=False)
    return partial(checkpoint, run, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, _choose))


def _choose(_: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    kept = operation in ATTENTION or operation in CHOICES
    # Widening products, into the feed-forward network or into queries, keys and values, take most of the memory.
    if operation in PRODUCTS:
        inner, columns = arguments[-1].shape
        kept = columns <= inner
    elif operation is GROUPED_PRODUCT:
        _, columns, inner = arguments[1].shape
        kept = columns <= inner
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def save_random_numbers() -> Any:
    """A compiler pass over a layer's joint forward and backward graph that marks random numbers to be saved.

    The compiler may recompute anything to stay within its budget, and random numbers drawn a second time would differ from the
    first and give wrong gradients.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class SaveRandomNumbers(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            for node in graph.nodes:
                if _draws(node):
                    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
                    node.meta["memory_budget"] = max(partition_config.activation_memory_budget, LEAST)

        def uuid(self) -> bytes:
            return get_hash_for_files((__file__,))

    return SaveRandomNumbers()


def _draws(node: fx.Node) -> bool:
    operation = node.target
    if not isinstance(operation, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    names = [argument.name for argument in operation._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" not in names or bool(given.get("dropout_p", 0.0) != 0.0)
