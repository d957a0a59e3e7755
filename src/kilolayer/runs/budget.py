"""The cost of a model, computed without allocating it: parameters, FLOPs, memory in training and decoding, and what is sent."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from kilolayer.errors import OptionError
from kilolayer.layers.attention import CrossAttention, SelfAttention
from kilolayer.layers.block import Block, CrossBlock
from kilolayer.layers.context import Sequences
from kilolayer.layers.multiway import parameters_of_others
from kilolayer.layers.projection import Projection
from kilolayer.layers.stack import Stack
from kilolayer.models.build import build_model
from kilolayer.models.config import ModelConfig
from kilolayer.models.image_encoder import ImageEncoder
from kilolayer.models.model import Model, cast_weights
from kilolayer.models.trainable_config import TrainableConfig
from kilolayer.moe.experts import ExpertProjection
from kilolayer.moe.layer import idle_parameters
from kilolayer.moe.router import Router
from kilolayer.optimizers import registry as optimizers
from kilolayer.optimizers.base import UpdateRule
from kilolayer.recipes.base import NormSpec
from kilolayer.runs.chosen_runtime import choose_runtime
from kilolayer.runs.division import Division, Held, Sent, Weights, weights_of
from kilolayer.runtime.activations import AsWithData, kept_sizes
from kilolayer.runtime.runtime import Runtime

Precision = Literal["fp32", "bf16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LARGEST_TENSOR = 2**58  # elements
RESIDUAL = torch.float32  # dtype of the states between layers, whatever the dtype of the products
WORKSPACES = 3 * 2**25
"""Bytes of cuBLAS's workspaces on a Hopper GPU: 32 MiB for each stream and thread that multiplies."""
COPIES_OF_PIXEL_SCORES = 3  # log-probabilities, their gradient, and that of the scores


@dataclass(frozen=True)
class Work:
    """The batch to estimate: `batch` sequences of `length` tokens per side; decoding keeps `beam` hypotheses of each.

    scored: the number of positions per sequence with logits; fewer than `length` in a masked language model.
    accumulate: batches per step. Each of several processes has its own batches.
    """

    batch: int = 64
    length: int = 64
    beam: int = 5
    precision: Precision = "bf16"
    scored: int | None = None
    accumulate: int = 1

    @property
    def scores(self) -> int:
        """The number of positions in the batch with logits."""
        return self.batch * (self.length if self.scored is None else self.scored)


@dataclass(frozen=True)
class Activations:
    """Bytes of a batch: `kept` for the backward pass, or `recomputed` if that recomputes each layer.

    logits: of the workspace of the loss. layer: of the gradients in the backward pass of a layer that are alive at once.
    """

    kept: int
    recomputed: int
    logits: int = 0
    layer: int = 0

    def __add__(self, other: Activations) -> Activations:
        """Of two parts of a model that run one after the other."""
        kept, recomputed = self.kept + other.kept, self.recomputed + other.recomputed
        return Activations(kept, recomputed, max(self.logits, other.logits), max(self.layer, other.layer))


@dataclass(frozen=True)
class Training(Held):
    """Bytes of a process in training: what it holds of the weights and what belongs to them, and its batch.

    With bf16, the optimizer keeps fp32 masters of whole matrices too; shards are their own. In the backward pass gradients are
    allocated as activations are freed, so the peak has the larger of the two, not both; those of a layer come on top of all
    activations, when the backward pass begins. workspaces: of the libraries that multiply matrices, on a GPU.
    """

    activations: int
    activations_recomputed: int
    logits: int
    layer: int
    workspaces: int

    @property
    def peak(self) -> int:
        """Peak memory if all activations are kept."""
        return self._peak(self.activations)

    @property
    def peak_recomputed(self) -> int:
        """Peak memory if each layer is recomputed in the backward pass."""
        return self._peak(self.activations_recomputed)

    @property
    def least(self) -> int:
        """Memory that no batch can do without: that at the end of the backward pass."""
        return self.weights + self.optimizer + self.sums + self.gradients + self.at_end + self.workspaces

    def _peak(self, activations: int) -> int:
        first = activations + self.gathered + max(self.logits, self.layer, self.scattered)
        return max(self.least, self.weights + self.optimizer + self.sums + first + self.workspaces)


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
    per token on the output side. weights: of the whole model. activations: of one process.
    """

    work: Work
    division: Division
    weights: Weights
    parts: dict[str, int]
    active_parameters: int
    forward_flops_per_token: float
    activations: Activations
    decoding: Decoding | None

    @property
    def training(self) -> Training:
        """The memory of each process; of that with the largest part, if they differ."""
        held = self.weights.held(self.division, DTYPES[self.work.precision].itemsize, collects=self.work.accumulate > 1)
        batch = self.activations
        return Training(
            **vars(held),
            activations=batch.kept,
            activations_recomputed=batch.recomputed,
            logits=batch.logits,
            layer=batch.layer,
            workspaces=WORKSPACES if self.work.precision == "bf16" else 0,  # what a GPU is trained in
        )

    @property
    def sent(self) -> Sent:
        """What each process sends in a step."""
        return self.weights.sent(self.division, DTYPES[self.work.precision].itemsize, self.work.accumulate)

    @property
    def parameters(self) -> int:
        return sum(self.parts.values())

    @property
    def training_flops_per_token(self) -> float:
        """FLOPs of forward and backward pass; the backward pass has two products for each of the forward pass."""
        return 3 * self.forward_flops_per_token


def budget(
    config: ModelConfig | TrainableConfig,
    work: Work,
    rule: UpdateRule | None = None,
    runtime: Runtime | None = None,
    division: Division | None = None,
) -> Budget:
    """The cost of the model that `config` describes on the batch `work`; nothing is allocated.

    rule: the optimizer's, by default Adam's. runtime: what the model is trained by; by default what a run chooses. division:
    what several processes share; by default there is one.
    """
    division, rule = division or Division(), rule or optimizers.get(optimizers.DEFAULT)
    division.check(config)
    if isinstance(config, TrainableConfig):
        return _own_budget(config, replace(work, precision="fp32"), rule, division)
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
        return _budget(config, work, rule, runtime or choose_runtime(), division)
    finally:
        if collects:
            gc.enable()


def _budget(config: ModelConfig, work: Work, rule: UpdateRule, runtime: Runtime, division: Division) -> Budget:
    model = build_model(config, device="meta", seed=0)
    parts = _parts(model)
    total, size = sum(parts.values()), DTYPES[work.precision].itemsize
    flops = _forward_flops(model.stacks(), config, work)
    alone = division.processes == 1
    activations = _activations(model, config, work, runtime, alone=alone)
    if isinstance(model, ImageEncoder) and model.decoder is not None:
        # It reads all patches, also if the encoder does not.
        inner, whole = model.decoder, replace(work, length=model.image.length, scored=None)
        flops += _forward_flops(inner.stacks(), inner.config, whole)
        activations += _activations(inner, inner.config, whole, runtime, alone=alone)
    if isinstance(model, ImageEncoder) and model.map_head is not None and config.map_head is not None:
        of_head, more = _map_head_cost(model, work)
        activations, flops = activations + of_head, flops + more
    active = total - idle_parameters(model, config.moe) - parameters_of_others(model)
    return Budget(
        work=work,
        division=division,
        weights=weights_of(model, rule),
        parts=parts,
        active_parameters=active,
        forward_flops_per_token=flops / (work.batch * work.length),
        activations=activations,
        decoding=_decoding(config, work, total * size),
    )


def _own_budget(config: TrainableConfig, work: Work, rule: UpdateRule, division: Division) -> Budget:
    """The cost of a model that a task brings, which is trained in fp32, from a forward pass on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode

    model, inputs = build_model(config, device="meta", seed=0), config.inputs(work.batch)
    with AsWithData(), FlopCounterMode(display=False) as counter:
        kept = sum(kept_sizes(lambda: model(*inputs), model, Sequences(inputs[0])))
    parts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        part = name.partition(".")[0].replace("_", " ")
        parts[part] = parts.get(part, 0) + parameter.numel()
    return Budget(
        work=work,
        division=division,
        weights=weights_of(model, rule),
        parts=parts,
        active_parameters=sum(parts.values()),
        forward_flops_per_token=counter.get_total_flops() / (work.batch * work.length),
        activations=Activations(kept, kept),
        decoding=None,
    )


def _parts(model: nn.Module) -> dict[str, int]:
    """Parameters by part: tables, and the attention, feed-forward, expert, router and other parameters of each stack."""
    parts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        owner, *path = name.split(".")
        sublayer = path[path.index("blocks") + 2] if "blocks" in path else ""
        kind = "attention" if sublayer.endswith("attention") else "feed-forward" if sublayer == "feedforward" else "other"
        kind = next((part for part in ("experts", "router") if part in path), kind)
        part = f"{owner} {kind}" if owner in ("encoder", "decoder") else owner.replace("_", " ")
        parts[part] = parts.get(part, 0) + parameter.numel()
    return parts


def _forward_flops(stacks: list[Stack], config: ModelConfig, work: Work) -> float:
    tokens = work.batch * work.length
    flops = 2.0 * work.scores * config.dim * (config.vocab_size or 0) if config.predicts else 0.0
    if config.predicts and config.output_transform:
        flops += 2.0 * work.scores * config.dim**2
    if config.head is not None:
        pooler = config.dim if config.head.pooler == "tanh" else 0
        flops = 2.0 * work.batch * config.dim * (pooler + config.head.outputs)
    if config.image is not None:
        flops += 2.0 * work.batch * (work.length - config.image.first_patch) * config.dim * config.image.pixels
    # q k^T and its product with v: 4 x dim per query and key; a causal query sees half of the keys on average.
    attention = 4.0 * tokens * config.dim * work.length
    for stack in stacks:
        for module in stack.modules():
            if isinstance(module, Projection):
                flops += 2.0 * tokens * module.weight.numel() / (config.multiway or 1)
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


def _activations(model: Model, config: ModelConfig, work: Work, runtime: Runtime, *, alone: bool) -> Activations:
    """What a batch takes: with all activations of all layers, and with only the input of each layer.

    alone: whether this process has all experts, so that layers with experts are compiled whole.
    """
    dtype = DTYPES[work.precision]
    state = work.batch * work.length * config.dim * RESIDUAL.itemsize
    kept, recomputed, largest, gradients = 0, 0, 0, 0
    for stack in model.stacks():
        cast_weights(stack.positions, dtype, RESIDUAL)
        layers = len(stack.blocks)
        ends, shared = layers * stack.stream.states_kept * state, 0
        # Layers of the same kind keep the same: with or without experts, and with the same placement of norms.
        for kind, count in Counter(map(_kind_of, stack.layers())).items():
            first = next(block for block in stack.layers() if _kind_of(block) == kind)
            for block in (stack.layers()[0], first):  # a stack takes the dtype of its products from its first layer
                cast_weights(block, dtype, RESIDUAL)
            inputs, memory = _layer_inputs(first, config, work)
            of_layer = runtime.kept_by_layer(stack, first, inputs, memory)
            kept += count * of_layer.layer
            recomputed += count * of_layer.drawn if alone or not first.is_sparse else 0
            largest, shared = max(largest, of_layer.layer - of_layer.drawn), of_layer.shared
            # That of its input, and that of its largest tensor, which is still kept while its gradient is computed.
            gradients = max(gradients, state + of_layer.largest)
        x = torch.empty(work.batch, work.length, config.dim, device="meta", dtype=RESIDUAL, requires_grad=True)
        ends += shared + sum(kept_sizes(lambda stack=stack, x=x: stack.top(x), stack, Sequences(x)))
        kept += ends
        recomputed += layers * stack.stream.states_taken * state + ends
    read, logits = _outputs(model, config, work)
    if isinstance(model, ImageEncoder):
        read += dtype.itemsize * work.batch * (model.image.length - model.image.first_patch) * model.image.pixels
    return Activations(kept + read, recomputed + largest + read, logits, gradients)


def _outputs(model: Model, config: ModelConfig, work: Work) -> tuple[int, int]:
    """Bytes of the states that the output reads, and of the logits, which their gradient overwrites."""
    size = DTYPES[work.precision].itemsize
    if config.head is not None:  # it reads a part of all states, in their dtype
        return work.batch * work.length * config.dim * RESIDUAL.itemsize, size * work.batch * config.head.outputs
    if isinstance(model, ImageEncoder) and model.decoder is not None:
        return size * work.batch * work.length * config.dim, 0
    return size * work.scores * config.dim * config.predicts, size * work.scores * (config.vocab_size or 0)


def _map_head_cost(model: ImageEncoder, work: Work) -> tuple[Activations, float]:
    """What a map head keeps for the backward pass, and its FLOPs."""
    head, image, options = model.map_head, model.image, model.config.map_head
    assert head is not None
    assert options is not None
    cast_weights(head, DTYPES[work.precision], RESIDUAL)
    shape = (work.batch, image.length - image.first_patch, model.config.dim)
    states = [torch.empty(shape, device="meta", dtype=RESIDUAL, requires_grad=True) for _ in head.depths or (0,)]
    with FlopCounterMode(display=False) as counter:
        kept = sum(kept_sizes(lambda: head(states, image.grid, image.sides), head, Sequences(states[0]), shared=states))
    height, width = image.sides
    scores = COPIES_OF_PIXEL_SCORES * 4 * work.batch * options.classes * height * width  # in fp32
    return Activations(kept, kept, scores), float(counter.get_total_flops())


def _kind_of(block: Block) -> tuple[type[Block], bool, tuple[NormSpec | None, ...]]:
    plans = [sublayer.plan for sublayer in block.sublayers()]
    return (
        type(block),
        block.is_sparse,
        tuple(norm for plan in plans for norm in (plan.pre_norm, plan.inner_norm, plan.post_norm, plan.out_norm)),
    )


def _layer_inputs(block: Block, config: ModelConfig, work: Work) -> tuple[Sequences, Sequences | None]:
    """The input of a layer, and the encoder's output for a layer that reads it, on the meta device."""
    x = torch.empty(work.batch, work.length, config.dim, device="meta", dtype=RESIDUAL, requires_grad=True)
    real = torch.ones(work.batch, work.length, device="meta", dtype=torch.bool) if config.pad_id is not None else None
    memory = Sequences(torch.empty_like(x, requires_grad=True), real) if isinstance(block, CrossBlock) else None
    grid = None if config.image is None else torch.zeros(1, work.length, 2, device="meta", dtype=torch.int64)
    split = None if config.multiway is None else work.length // 2
    return Sequences(x, real, split=split, coordinates=grid), memory


def _decoding(config: ModelConfig, work: Work, weights: int) -> Decoding | None:
    if config.shape == "encoder":
        return None
    position = 2 * config.key_heads * config.head_dim * DTYPES[work.precision].itemsize
    # The hypotheses of a sentence share the keys and values of its source.
    source = config.depths.decoder * work.batch * work.length * position
    return Decoding(weights, source * work.beam, source if config.depths.paired else 0)
