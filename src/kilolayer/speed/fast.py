"""The fast form of a model: the same parameters under the same names, run by fused operators and compiled layers."""

from __future__ import annotations

import warnings
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from kilolayer.layers.block import MultiwayBlock
from kilolayer.layers.embedding import Embedding, VocabularyProjection, scores_of
from kilolayer.layers.modules import shallow_copy
from kilolayer.layers.stack import Stack
from kilolayer.models.sharded import plain_class
from kilolayer.speed.compiler import Recompute
from kilolayer.speed.fast_layer import why_unfused
from kilolayer.speed.fast_multiway import ways_of
from kilolayer.speed.fast_stack import FastStack
from kilolayer.speed.inspection import LAYERS
from kilolayer.speed.operators.few_rows import linear

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def unfused_residuals(form: nn.Module) -> list[str]:
    """A message about half-precision stacks whose residuals cannot use the fused kernel, naming the option that prevents it."""
    texts = []
    for stack in form.modules():
        if isinstance(stack, FastStack) and stack.product_dtype in (torch.bfloat16, torch.float16):
            known = [block for block in stack.layers() if plain_class(block) in LAYERS]
            first = known[0] if known else None
            reason = None if first is None else why_unfused(ways_of(first).A if isinstance(first, MultiwayBlock) else first)
            if reason is not None:
                texts.append(f"layers of the {stack.side} add their residuals without a kernel, because {reason}")
    return texts


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


def is_ours(stack: Stack) -> bool:
    """Whether a stack has no methods of a user's own."""
    return plain_class(stack) in (Stack, FastStack)


def fast_form(module: AnyModule, recompute: Recompute = "none") -> AnyModule:
    """A copy of the module that shares its parts but has fast stacks and tables; the module itself if it contains none."""
    if isinstance(module, FastStack) and module.recompute == recompute:
        return module
    if isinstance(module, Stack):
        return cast("AnyModule", FastStack.of(module, recompute)) if is_ours(module) else module
    for plain, kind in ((Embedding, FastEmbedding), (VocabularyProjection, FastVocabularyProjection)):
        if type(module) is plain:
            return cast("AnyModule", _as_class(kind, module))
    parts = {name: None if part is None else fast_form(part, recompute) for name, part in module._modules.items()}
    if all(part is module._modules[name] for name, part in parts.items()):
        return module
    return shallow_copy(module, _modules=parts)


def _as_class(kind: type[nn.Module], module: nn.Module) -> nn.Module:
    form = kind.__new__(kind)
    # Both share one __dict__, so that an attribute set on either, such as `states_dtype` by `cast_weights`, is set on both.
    form.__dict__ = module.__dict__
    return form
