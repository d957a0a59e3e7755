"""The fast runtime: fused operators, compiled layers, recorded steps, and decoding in memory of fixed shape."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from kilolayer.errors import InputError, shown, unknown
from kilolayer.layers.block import Block
from kilolayer.layers.context import Sequences
from kilolayer.layers.stack import Stack
from kilolayer.models.decoder import Decoder
from kilolayer.models.encoder_decoder import EncoderDecoder
from kilolayer.models.trainable import Trainable
from kilolayer.moe.shard import expert_group
from kilolayer.runtime.activations import Kept
from kilolayer.runtime.reader import BeamSteps, Reader, Reads
from kilolayer.runtime.recorder import Recorder
from kilolayer.runtime.runtime import Recompute, Runtime, sum_losses
from kilolayer.speed.activations import kept_by_fast_layer
from kilolayer.speed.compiler import BUDGETS
from kilolayer.speed.fast import compile_layers, fast_form, is_ours, unfused_residuals
from kilolayer.speed.graph import GraphPool
from kilolayer.speed.graph_recorder import GraphRecorder
from kilolayer.speed.inspection import has_hooks
from kilolayer.speed.operators import kernels
from kilolayer.speed.operators.score_statistics import can_fuse_score_statistics, score_statistics
from kilolayer.speed.operators.top import top
from kilolayer.speed.static_beam import StaticBeam
from kilolayer.speed.static_reader import StaticReader
from kilolayer.speed.written import unroll_for_cpu

AnyModule = TypeVar("AnyModule", bound=nn.Module)
AnyModel = TypeVar("AnyModel", bound=Trainable)
Generator = TypeVar("Generator", bound=EncoderDecoder | Decoder)
logger = logging.getLogger(__name__)


class FastRuntime(Runtime):
    """Runs a model in the fastest form that supports its layers, its device and its dtype, and in the plain form otherwise."""

    def training_form(
        self, model: AnyModel, device: torch.device, say: Callable[[str], None], *, eager: bool, recompute: Recompute
    ) -> tuple[AnyModel, Recorder]:
        """With `eager`, or on the CPU, layers are not compiled."""
        form = fast_form(model, recompute)
        records = device.type == "cuda" and not eager and _compile(form, say)
        recorder = GraphRecorder(device, "steps run", say, GraphPool(device)) if records else Recorder(device)
        return self.bind(form), recorder

    def decoding_form(self, model: Generator, *, int8: bool = False) -> Generator:
        return unroll_for_cpu(model, int8=int8)

    def reader(self, model: EncoderDecoder | Decoder, source: Tensor, *, width: int, max_length: int) -> Reads:
        if is_recorded(model):
            return StaticReader(model, source, width=width, max_length=max_length)
        return Reader(self.decoding_form(model), source, width=width, max_length=max_length, top=top)

    def beam_steps(self, model: EncoderDecoder | Decoder, source: Tensor, *, beam: int, max_length: int) -> BeamSteps | None:
        if isinstance(model, EncoderDecoder) and is_recorded(model):
            return StaticBeam(model, source, beam=beam, max_length=max_length)
        return None

    def token_losses(self, logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        if not can_fuse_score_statistics(logits.device):
            return super().token_losses(logits, labels, smoothing)
        rows = labels.flatten()
        total, chosen, mean = score_statistics(logits.flatten(0, 1).contiguous(), rows)
        return sum_losses(total - chosen, total - mean, rows, smoothing)

    def kept_by_layer(self, stack: Stack, block: Block, inputs: Sequences, memory: Sequences | None) -> Kept:
        return kept_by_fast_layer(stack, block, inputs, memory)

    def update_kernel(self, groups: list[Any]) -> Any:
        if groups[0].weights[0].device.type != "cuda" or kernels.why_no_kernels() is not None:
            return None
        from kilolayer.speed.operators.update_kernel import UpdateKernel  # needs Triton

        return UpdateKernel(groups, [group.rule.kernel for group in groups])


FAST = FastRuntime()


def _compile(form: Trainable, say: Callable[[str], None]) -> bool:
    """Compile the layers; return whether steps can be recorded."""
    if (reason := kernels.why_no_kernels()) is not None:
        say(f"steps run in eager mode, because {reason}")
        return False
    for text in unfused_residuals(form):
        say(text)
    compile_layers(form)
    if expert_group(form) is not None:
        say("steps are compiled, but not recorded, because several processes share the experts")
        return False
    torch.cuda.empty_cache()  # memory freed after building the model belongs to another stream, and no step could reuse it
    return True


def is_recorded(model: EncoderDecoder | Decoder) -> bool:
    """Whether decoding steps are recorded as CUDA graphs in memory of fixed shape: on a GPU, if no hooks are to be called.

    Experts shared among processes get different numbers of tokens at each step, which cannot be recorded.
    """
    return next(model.parameters()).device.type == "cuda" and not has_hooks(model) and expert_group(model) is None


def fast(model: AnyModule, *, compile: bool = True, recompute: Recompute = "none") -> AnyModule:  # noqa: A002, as in torch
    """A faster form of `model` that shares its parameters: nothing is copied, and the state dict is the same.

    model: an Encoder, Decoder or EncoderDecoder, or a module that contains one, on the device where it will run.
    compile: compile the layers for training, once per kind of layer, at the first step; only on a GPU.
    recompute: keep less of each layer for the backward pass and recompute the rest: "selective", or "layer" to keep only its
    input.
    Layers that contain modules of your own, or have a hook, run unchanged; this is logged once.
    """
    if recompute not in tuple(BUDGETS):
        raise unknown(str(recompute), BUDGETS, kind="recompute")
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            f"this is not a model: {shown(model)}", where="kl.fast", fix="give an Encoder, Decoder or EncoderDecoder"
        )
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    if not stacks:
        raise InputError("this model has no stack of layers to run faster", fix="give an Encoder, Decoder or EncoderDecoder")
    device = next(stacks[0].parameters()).device
    form = FAST.bind(fast_form(model, recompute))
    reason = why_not_fast(device)
    if reason is not None:
        logger.warning("layers run as plain modules, because %s", reason)
        return form
    for text in unfused_residuals(form):
        logger.warning(text)
    for stack in stacks:
        if not is_ours(stack):
            logger.warning("the layers of the %s run as plain modules, because it is a %s", stack.side, type(stack).__name__)
    if compile:
        compile_layers(form)
    return form


def why_not_fast(device: torch.device) -> str | None:
    """Why kernels and compiled layers cannot be used on this device; None if they can."""
    return f"the model is on {device.type}" if device.type != "cuda" else kernels.why_no_kernels()
