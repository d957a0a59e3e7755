"""The cost of a model, computed without allocating it: parameters, FLOPs and memory in training and decoding."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kilolayer.errors import OptionError
from kilolayer.layers.attention import CrossAttention, SelfAttention
from kilolayer.layers.block import Block, CrossBlock
from kilolayer.layers.projection import Projection
from kilolayer.layers.stack import Stack
from kilolayer.layers.stream import Latest
from kilolayer.layers.view import Sequences
from kilolayer.models.build import build_model
from kilolayer.models.config import ModelConfig
from kilolayer.models.model import Model, lower
from kilolayer.moe.experts import ExpertProjection
from kilolayer.moe.layer import idle_parameters
from kilolayer.moe.router import Router
from kilolayer.operators import kernels
from kilolayer.recipes.base import NormSpec
from kilolayer.speed.compiler import LayerKind, kind_of
from kilolayer.speed.fast import fast_form
from kilolayer.speed.fast_layer import DRAWS, first_state, needs_dropout_seeds, opening_norm, run_layer
from kilolayer.speed.fast_stack import FastStack
from kilolayer.speed.fast_view import FastView
from kilolayer.speed.state import State

Precision = Literal["fp32", "bf16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LARGEST_TENSOR = 2**58  # elements
RESIDUAL = torch.float32  # dtype of the states between layers, whatever the dtype of the products


@dataclass(frozen=True)
class Work:
    """The batch to estimate: `batch` sequences of `length` tokens per side; decoding keeps `beam` hypotheses of each.

    scored: the number of positions per sequence with logits; fewer than `length` in a masked language model.
    """

    batch: int = 64
    length: int = 64
    beam: int = 5
    precision: Precision = "bf16"
    scored: int | None = None

    @property
    def scores(self) -> int:
        """The number of positions in the batch with logits."""
        return self.batch * (self.length if self.scored is None else self.scored)


@dataclass(frozen=True)
class Training:
    """Bytes in training with Adam. With bf16, fp32 master weights are kept too; `logits` is the workspace of the loss.

    In the backward pass gradients are allocated as activations are freed, so the peak has the larger of the two, not both.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    activations_recomputed: int
    logits: int

    @property
    def peak(self) -> int:
        """Peak memory if all activations are kept."""
        return self._peak(self.activations)

    @property
    def peak_recomputed(self) -> int:
        """Peak memory if each layer is recomputed in the backward pass."""
        return self._peak(self.activations_recomputed)

    def _peak(self, activations: int) -> int:
        return self.weights + self.optimizer + max(self.gradients, activations + self.logits)


@dataclass(frozen=True)
class Decoding:
    """Bytes in step-by-step decoding: weights, and the cached keys and values of target and source."""

    weights: int
    target_cache: int
    source_cache: int

    @property
    def total(self) -> int:
        return self.weights + self.target_cache + self.source_cache


@dataclass(frozen=True)
class Budget:
    """The cost of a model.

    parts: parameters by part of the model; active parameters are those that a token uses. FLOPs count matrix products only,
    per token on the output side.
    """

    work: Work
    parts: dict[str, int]
    active_parameters: int
    forward_flops_per_token: float
    training: Training
    decoding: Decoding | None

    @property
    def parameters(self) -> int:
        return sum(self.parts.values())

    @property
    def training_flops_per_token(self) -> float:
        """FLOPs of forward and backward pass; the backward pass has two products for each of the forward pass."""
        return 3 * self.forward_flops_per_token


def budget(config: ModelConfig, work: Work) -> Budget:
    """The cost of the model that `config` describes on the batch `work`; nothing is allocated."""
    width = max(config.dim, config.ffn_dim, config.heads * work.length, config.vocab_size or 0)
    experts = 1 if config.moe is None else config.moe.top_k
    if work.batch * work.length * width * experts > LARGEST_TENSOR:
        raise OptionError(
            f"a batch of {work.batch:,} x {work.length:,} tokens makes a tensor of this model too large to compute its size",
            fix="lower the batch or the length",
        )
    # The garbage collector would traverse all modules of a deep model repeatedly, which takes half of the time.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _budget(config, work)
    finally:
        if collects:
            gc.enable()


def _budget(config: ModelConfig, work: Work) -> Budget:
    model = build_model(config, device="meta", seed=0)
    parts = _parts(model)
    total, size = sum(parts.values()), DTYPES[work.precision].itemsize
    master = 0 if work.precision == "fp32" else 4
    flops = _forward_flops(model.stacks(), config, work)
    kept, recomputed = _activations(model, config, work)
    logits = work.scores * (config.vocab_size or 0) if config.head is None else work.batch * config.head.outputs
    training = Training(
        weights=total * size,
        gradients=total * size,
        optimizer=total * (8 + master),
        activations=kept,
        activations_recomputed=recomputed,
        # The gradient overwrites the logits.
        logits=logits * size,
    )
    return Budget(
        work=work,
        parts=parts,
        active_parameters=total - idle_parameters(model, config.moe),
        forward_flops_per_token=flops / (work.batch * work.length),
        training=training,
        decoding=_decoding(config, work, total * size),
    )


def _parts(model: nn.Module) -> dict[str, int]:
    """Parameters by part: tables, and the attention, feed-forward, expert, router and other parameters of each stack."""
    parts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        owner, *path = name.split(".")
        sublayer = path[2] if path[0] == "blocks" else ""
        kind = "attention" if sublayer.endswith("attention") else "feed-forward" if sublayer == "feedforward" else "other"
        kind = next((part for part in ("experts", "router") if part in path), kind)
        part = f"{owner} {kind}" if owner in ("encoder", "decoder") else owner.replace("_", " ")
        parts[part] = parts.get(part, 0) + parameter.numel()
    return parts


def _forward_flops(stacks: list[Stack], config: ModelConfig, work: Work) -> float:
    tokens = work.batch * work.length
    flops = 2.0 * work.scores * config.dim * (config.vocab_size or 0)
    if config.head is not None:
        flops = 2.0 * work.batch * config.dim * (config.dim + config.head.outputs)
    # q k^T and its product with v: 4 x dim per query and key; a causal query sees half of the keys on average.
    attention = 4.0 * tokens * config.dim * work.length
    for stack in stacks:
        for module in stack.modules():
            if isinstance(module, Projection):
                flops += 2.0 * tokens * module.weight.numel()
            elif isinstance(module, ExpertProjection):
                assert config.moe is not None
                flops += 2.0 * tokens * config.moe.top_k * module.weight[0].numel()
            elif isinstance(module, Router):
                flops += 2.0 * tokens * sum(matrix.numel() for matrix in module.parameters() if matrix.dim() == 2)
            elif isinstance(module, SelfAttention):
                flops += attention * (0.5 if stack.side == "decoder" else 1.0)
            elif isinstance(module, CrossAttention):
                flops += attention
    return flops


def _activations(model: Model, config: ModelConfig, work: Work) -> tuple[int, int]:
    """Bytes kept for the backward pass: with all activations of all layers, and with only the input of each layer."""
    form, dtype = fast_form(model), DTYPES[work.precision]
    state = work.batch * work.length * config.dim * RESIDUAL.itemsize
    kept, recomputed, largest = 0, 0, 0
    for stack in form.stacks():
        assert isinstance(stack, FastStack)
        lower(stack.positions, dtype, RESIDUAL)
        layers = len(stack.blocks)
        stream = layers * stack.stream.states_kept * state
        shared = 0
        # Layers of the same kind keep the same: with or without experts, and with the same placement of norms.
        for kind, count in Counter(map(_kind_of, stack.layers())).items():
            first = next(block for block in stack.layers() if _kind_of(block) == kind)
            for block in (stack.layers()[0], first):  # a stack takes the dtype of its products from its first layer
                lower(block, dtype, RESIDUAL)
            layer, shared = _layer_activations(stack, first, config, work)
            kept += count * layer
            largest = max(largest, layer)
        kept += shared + stream
        recomputed += layers * stack.stream.states_taken * state + shared + stream
    return kept, recomputed + largest


def _kind_of(block: Block) -> tuple[LayerKind, tuple[NormSpec | None, ...]]:
    plans = [sublayer.plan for sublayer in block.sublayers()]
    return kind_of(block), tuple(
        norm for plan in plans for norm in (plan.pre_norm, plan.inner_norm, plan.post_norm, plan.out_norm)
    )


def _layer_activations(stack: FastStack, block: Block, config: ModelConfig, work: Work) -> tuple[int, int]:
    """Bytes kept for the backward pass by one layer, and by what all layers share; from a forward pass on the meta device."""
    x = torch.empty(work.batch, work.length, config.dim, device="meta", dtype=RESIDUAL, requires_grad=True)
    real = torch.ones(work.batch, work.length, device="meta", dtype=torch.bool) if config.pad_id is not None else None
    inputs, memory = Sequences(x, real), None
    if isinstance(block, CrossBlock):
        memory = Sequences(torch.empty_like(x, requires_grad=True), real)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with kernels.assumed(), AsCompiled():
        _, view = stack.prepare_inputs(inputs, memory, None)
        # Layers of the same kind are alike: the layer before this one prepares its input as this one does for the next.
        following = opening_norm(block.sublayers()[0]) if isinstance(stack.stream, Latest) else None
        if isinstance(stack.stream, Latest):
            state = first_state(block, x, stack.product_dtype, following)
        else:
            state = State.of(stack.stream.read(stack.stream.begin(x), 0))
        seeds = (
            torch.empty(len(block.sublayers()), DRAWS, device="meta", dtype=torch.int64) if needs_dropout_seeds(block) else None
        )
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            run_layer(block, state, view, None, following, seeds)
    shared = list(_tensors(view))
    given = [*block.parameters(), *block.buffers(), *shared, *([] if real is None else [real])]
    given += [] if memory is None else [memory.states]
    others = {tensor.untyped_storage()._cdata for tensor in given}
    kept = {storage._cdata: storage.nbytes() for tensor in saved if (storage := tensor.untyped_storage())._cdata not in others}
    return sum(kept.values()), sum(tensor.untyped_storage().nbytes() for tensor in shared)


class AsCompiled(TorchFunctionMode):
    """Makes operations on the meta device keep the same tensors for the backward pass as fused kernels and compiled code.

    Without it, SDPA on the meta device would keep the whole score matrix, and dropout a mask of floats.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _FusedAttention.apply(*args)
        if func is F.dropout and kwargs and kwargs.get("training") and kwargs.get("p"):
            return _CompiledDropout.apply(args[0])
        return func(*args, **(kwargs or {}))


class _CompiledDropout(torch.autograd.Function):
    """Dropout that keeps its mask with one byte per element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)


class _FusedAttention(torch.autograd.Function):
    """Attention that keeps queries, keys, values, the output, and one fp32 number per head and query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out


def _tensors(view: FastView) -> Iterator[Tensor]:
    """The tensors that all layers of a stack share and keep: masks, rotary tables, and the encoder's output if it is rounded.

    If it is not rounded, it is already counted as an activation of the encoder.
    """
    masks = [view.key_bias, view.source_key_bias]
    if not view.short:
        masks = [mask.values for mask in (view.mask, view.memory_mask) if mask is not None]
    tables = [] if view.rotation is None else [view.rotation.cos, view.rotation.sin, view.rotation.decay]
    rounded = [] if view.source is None or view.source.rounded is view.source.precise else [view.source.rounded]
    yield from (tensor for tensor in (*masks, *tables, *rounded) if tensor is not None)


def _decoding(config: ModelConfig, work: Work, weights: int) -> Decoding | None:
    if config.shape == "encoder":
        return None
    position = 2 * config.key_heads * config.head_dim * DTYPES[work.precision].itemsize
    # The hypotheses of a sentence share the keys and values of its source.
    source = config.depths.decoder * work.batch * work.length * position
    return Decoding(weights, source * work.beam, source if config.depths.paired else 0)
