"""What a model costs, before anything is allocated: parameters, arithmetic and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kilolayer.layers.attention import CrossAttention, SelfAttention
from kilolayer.layers.block import View, make_block
from kilolayer.layers.mask import cross_mask, self_mask
from kilolayer.layers.memory import Memory
from kilolayer.layers.position import Positions, position_ids
from kilolayer.layers.projection import Projection
from kilolayer.layers.stack import Stack
from kilolayer.layers.stream import LayerCombination
from kilolayer.models.build import build_model
from kilolayer.models.config import ModelConfig
from kilolayer.models.model import lower
from kilolayer.moe.experts import ExpertProjection
from kilolayer.moe.layer import idle_parameters, make_sparsity
from kilolayer.moe.router import Router
from kilolayer.operators import kernels
from kilolayer.recipes.base import Side

Precision = Literal["fp32", "bf16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RESIDUAL = torch.float32  # of the states between layers, whatever products are in


@dataclass(frozen=True)
class Work:
    """The batch that is budgeted: `batch` sequences of `length` tokens a side; decoding keeps `beam` hypotheses of each."""

    batch: int = 64
    length: int = 64
    beam: int = 5
    precision: Precision = "bf16"


@dataclass(frozen=True)
class Training:
    """Bytes while training with Adam. bf16 keeps fp32 masters beside the moments; `logits` is the loss's working space.

    Gradients grow in the backward pass as activations go, so that the peak holds the larger of the two, not both.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    activations_recomputed: int
    logits: int

    @property
    def peak(self) -> int:
        """The most held at once when every activation is kept."""
        return self._peak(self.activations)

    @property
    def peak_recomputed(self) -> int:
        """The most held at once when each layer is recomputed in the backward pass."""
        return self._peak(self.activations_recomputed)

    def _peak(self, activations: int) -> int:
        return self.weights + self.optimizer + max(self.gradients, activations + self.logits)


@dataclass(frozen=True)
class Decoding:
    """Bytes while decoding step by step: weights, and the keys and values kept for target and source."""

    weights: int
    target_cache: int
    source_cache: int

    @property
    def total(self) -> int:
        return self.weights + self.target_cache + self.source_cache


@dataclass(frozen=True)
class Budget:
    """parts: parameters by part of the model; active ones: those that serve a token. FLOPs are of matrix products, a token of
    the output's side."""

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
        """Forward and backward: the backward pass multiplies each matrix twice."""
        return 3 * self.forward_flops_per_token


def budget(config: ModelConfig, work: Work) -> Budget:
    """The cost of the model that `config` describes on the batch `work`; nothing is allocated."""
    model = build_model(config, device="meta", seed=0)
    parts = _parts(model)
    total, size = sum(parts.values()), DTYPES[work.precision].itemsize
    master = 0 if work.precision == "fp32" else 4
    kept, recomputed = _activations(model.stacks(), config, work)
    logits = work.batch * work.length * (config.vocab_size or 0)
    training = Training(
        weights=total * size,
        gradients=total * size,
        optimizer=total * (8 + master),
        activations=kept,
        activations_recomputed=recomputed,
        # The gradient takes the place of the scores.
        logits=logits * size,
    )
    return Budget(
        work=work,
        parts=parts,
        active_parameters=total - idle_parameters(model, config.moe),
        forward_flops_per_token=_forward_flops(model.stacks(), config, work) / (work.batch * work.length),
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
    flops = 2.0 * tokens * config.dim * (config.vocab_size or 0)
    # Scores and mixing: 4 x dim a query and key; a causal query sees half of the keys on average.
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


def _activations(stacks: list[Stack], config: ModelConfig, work: Work) -> tuple[int, int]:
    """Bytes kept for the backward pass: of all layers, and where only each layer's input is kept."""
    state = work.batch * work.length * config.dim * RESIDUAL.itemsize
    kept, recomputed, largest = 0, 0, 0
    for stack in stacks:
        layers = len(stack.blocks)
        # A combination of layers keeps each layer's normalised output besides what the layers themselves keep.
        stream = layers * 2 * state if isinstance(stack.stream, LayerCombination) else 0
        shared = 0
        # Layers of one kind keep the same: those without experts, and those with.
        kinds = [type(block) for block in stack.blocks]
        for kind in set(kinds):
            layer, shared = _block_activations(config, stack.side, kinds.index(kind) + 1, work)
            kept += kinds.count(kind) * layer
            largest = max(largest, layer)
        kept += shared + stream
        recomputed += layers * state + shared + stream
    return kept, recomputed + largest


def _block_activations(config: ModelConfig, side: Side, layer: int, work: Work) -> tuple[int, int]:
    """Bytes kept for the backward pass by one layer, and by what all layers share; read off a forward without memory."""
    dtype = DTYPES[work.precision]
    # Fused attention regenerates its dropout; the other masks are added below, a byte an element as CUDA keeps them.
    options = replace(config, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, drop_path=0.0)
    device = torch.device("meta")
    block = make_block(options, config.recipe, side, layer, config.depths, device, RESIDUAL, make_sparsity(config.moe))
    lower(block, dtype, RESIDUAL)
    x = torch.empty(work.batch, work.length, config.dim, device=device, dtype=RESIDUAL, requires_grad=True)
    real = None if config.pad_id is None else torch.ones(work.batch, work.length, device=device, dtype=torch.bool)
    reads = side == "decoder" and config.depths.paired
    memory = Memory.of(torch.empty_like(x, requires_grad=True), dtype) if reads else None
    view = _view(Positions(options, side, device, dtype), x, memory, real, side, dtype)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    # Layers of a kind are alike: what this one reads was prepared as it prepares what the next one reads.
    following = block.sublayers()[0].opening if config.recipe.stream() is None else None
    with kernels.assumed(), FusedAttention():
        state = block.start(x, dtype, following)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            block(state, view, None, following)
    given = [*block.parameters(), *block.buffers(), *_tensors(view), *(memory or ()), *([] if real is None else [real])]
    others = {tensor.untyped_storage()._cdata for tensor in given}
    kept = {storage._cdata: storage.nbytes() for tensor in saved if (storage := tensor.untyped_storage())._cdata not in others}
    tokens = work.batch * work.length
    masks = tokens * config.dim * len(block.kinds()) * (config.dropout > 0)
    if config.activation_dropout > 0:
        rows = tokens * config.moe.top_k if config.moe is not None and layer % config.moe.every == 0 else tokens
        masks += rows * config.ffn_dim * (1 + dtype.itemsize)
    return sum(kept.values()) + masks, sum(tensor.untyped_storage().nbytes() for tensor in _tensors(view))


class FusedAttention(TorchFunctionMode):
    """Lets SDPA on the meta device keep what fused kernels keep; there it would fall back to the whole score matrix."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _FusedAttention.apply(*args)
        return func(*args, **(kwargs or {}))


class _FusedAttention(torch.autograd.Function):
    """Keeps queries, keys, values, the output, and one fp32 number a head and query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out


def _view(positions: Positions, x: Tensor, memory: Memory | None, real: Tensor | None, side: Side, dtype: torch.dtype) -> View:
    length = x.shape[1]
    places = position_ids(length, device=x.device, real=real, segments=None)
    mask = self_mask(length, causal=side == "decoder", device=x.device, real=real, segments=None)
    if positions.bias is not None:
        mask = mask.with_bias(positions.bias(places, places))
    rotation = None if positions.rotary is None else positions.rotary(places, dtype)
    reading = None if memory is None else cross_mask(real=real, segments=None, memory_segments=None).as_bias(dtype)
    return View(mask.as_bias(dtype), rotation, 0, memory, reading, real)


def _tensors(view: View) -> Iterator[Tensor]:
    """What all layers of a stack share: masks, positions, and the memory where it is rounded for them.

    As it is, the memory is the encoder's own activation.
    """
    masks = [mask.values for mask in (view.mask, view.memory_mask) if mask is not None]
    tables = [] if view.rotation is None else [view.rotation.cos, view.rotation.sin, view.rotation.decay]
    rounded = [] if view.memory is None or view.memory.rounded is view.memory.precise else [view.memory.rounded]
    yield from (tensor for tensor in (*masks, *tables, *rounded) if tensor is not None)


def _decoding(config: ModelConfig, work: Work, weights: int) -> Decoding | None:
    if config.shape == "encoder":
        return None
    position = 2 * config.key_heads * config.head_dim * DTYPES[work.precision].itemsize
    # The hypotheses of a sentence share the keys and values of its source.
    source = config.depths.decoder * work.batch * work.length * position
    return Decoding(weights, source * work.beam, source if config.depths.paired else 0)
