"""The fast form of a model: the same parameters under the same names, run by fused operators and compiled layers."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from kilolayer.errors import InputError, unknown
from kilolayer.layers.embedding import Embedding, VocabularyProjection, scores_of
from kilolayer.layers.stack import Stack
from kilolayer.operators import kernels
from kilolayer.operators.few_rows import linear
from kilolayer.speed.compiler import BUDGETS, Recompute
from kilolayer.speed.fast_layer import why_unfused
from kilolayer.speed.fast_stack import FastStack
from kilolayer.speed.inspection import LAYERS

AnyModule = TypeVar("AnyModule", bound=nn.Module)
logger = logging.getLogger(__name__)


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
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    if not stacks:
        raise InputError("this model has no stack of layers to run faster", fix="give an Encoder, Decoder or EncoderDecoder")
    device = next(stacks[0].parameters()).device
    form = fast_form(model, recompute)
    reason = why_not_fast(device)
    if reason is not None:
        logger.warning("layers run as plain modules, because %s", reason)
        return form
    for text in unfused_residuals(form):
        logger.warning(text)
    if compile:
        compile_layers(form)
    return form


def unfused_residuals(form: nn.Module) -> list[str]:
    """A message about half-precision stacks whose residuals cannot use the fused kernel, naming the option that prevents it."""
    texts = []
    for stack in form.modules():
        if isinstance(stack, FastStack) and stack.product_dtype in (torch.bfloat16, torch.float16):
            known = [block for block in stack.layers() if type(block) in LAYERS]
            reason = why_unfused(known[0]) if known else None
            if reason is not None:
                texts.append(f"layers of the {stack.side} add their residuals without a kernel, because {reason}")
    return texts


def why_not_fast(device: torch.device) -> str | None:
    """Why kernels and compiled layers cannot be used on this device; None if they can."""
    return f"the model is on {device.type}" if device.type != "cuda" else kernels.why_no_kernels()


def compile_layers(form: nn.Module, backend: str = "inductor") -> None:
    """Compile the layers of all stacks of a fast form."""
    # Hides warnings that are meant for developers of the compiler.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\._inductor")
    for module in form.modules():
        if isinstance(module, FastStack):
            module.compile(backend)


class FastEmbedding(Embedding):
    """An embedding on the same table, with logits from `fast_scores`."""

    def scores(self, states: Tensor) -> Tensor:
        return fast_scores(states, self.weight)


class FastVocabularyProjection(VocabularyProjection):
    """An output projection on the same table, with logits from `fast_scores`."""

    def forward(self, states: Tensor) -> Tensor:
        return fast_scores(states, self.weight)


def fast_scores(states: Tensor, table: Tensor) -> Tensor:
    """As `scores_of`, but on a GPU a 16-bit table gives fp32 logits without being converted."""
    if torch.is_grad_enabled() or states.device.type != "cuda":
        return scores_of(states, table)
    states = states.to(table.dtype)
    if table.dtype not in (torch.bfloat16, torch.float16):
        return linear(states, table)
    return torch.mm(states.flatten(0, -2), table.t(), out_dtype=torch.float32).unflatten(0, states.shape[:-1])


def fast_form(module: AnyModule, recompute: Recompute = "none") -> AnyModule:
    """A copy of the module that shares its parts but has fast stacks and tables; the module itself if it contains none."""
    if isinstance(module, FastStack) and module.recompute == recompute:
        return module
    if isinstance(module, Stack):
        return cast("AnyModule", FastStack.of(module, recompute))
    for plain, kind in ((Embedding, FastEmbedding), (VocabularyProjection, FastVocabularyProjection)):
        if type(module) is plain:
            return cast("AnyModule", _as_class(kind, module))
    parts = {name: None if part is None else fast_form(part, recompute) for name, part in module._modules.items()}
    if all(part is module._modules[name] for name, part in parts.items()):
        return module
    form = copy.copy(module)
    form._modules = parts
    return form


def _as_class(kind: type[nn.Module], module: nn.Module) -> nn.Module:
    form = kind.__new__(kind)
    # Both share one __dict__, so that an attribute set on either, such as `states_dtype` by `lower`, is set on both.
    form.__dict__ = module.__dict__
    return form
