"""A model of Kilolayer with the weights of an adapted one: the same numbers by role, for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import kilolayer as kl
from kilolayer.layers.context import Sequences
from kilolayer.models.adapt.additions import attribute
from kilolayer.models.adapt.stacks import ForeignModel, ForeignStack
from kilolayer.models.adapt.sublayers import Matrix
from kilolayer.recipes.base import Recipe
from kilolayer.recipes.role import Role
from tests.models.adapt.adaptable_models import DIM, FFN, HEADS, LAYERS

Twin = tuple[Callable[[str], Tensor | None], Callable[[str], Tensor | None]]
"""Their tensor and ours: the values ("data") or the gradient ("grad")."""


def our_model(found: ForeignModel, recipe: str | Recipe, eps: float, activation: str) -> Any:
    """A model of ours of the same shape, without embeddings of its own."""
    sizes: dict[str, Any] = {"dim": DIM, "heads": HEADS, "ffn_dim": FFN, "recipe": recipe, "norm_eps": eps}
    sizes |= {"positions": "none", "activation": activation, "dtype": torch.float64}
    if found.depths.paired:
        return kl.EncoderDecoder(4, **sizes, encoder_layers=LAYERS, decoder_layers=LAYERS)
    if found.stacks[0].side == "encoder":
        return kl.Encoder(None, **sizes, layers=LAYERS)
    return kl.Decoder(4, **sizes, layers=LAYERS)


def run_ours(
    model: Any, found: ForeignModel, inputs: dict[str, Tensor], memory: Tensor | None, real: dict[str, Tensor | None]
) -> Tensor:
    """The states of the last stack, from what entered the first layer of each of theirs."""
    read = None
    for stack in found.stacks:
        source = Sequences(inputs[stack.side], real[stack.side])
        if stack.side == "encoder":
            read = Sequences(model.encoder(source).states, real["encoder"])
        elif not found.depths.paired:
            return model.decoder(source).states
        else:
            return model.decoder(source, memory=read or Sequences(_given(memory), real["encoder"])).states
    assert read is not None
    return read.states


def twins(found: ForeignModel, model: Any, final_norms: dict[str, nn.Module]) -> Iterator[Twin]:
    """All pairs of tensors that must be equal."""
    for stack in found.stacks:
        ours = model.get_submodule(stack.side)
        yield from _stack_twins(stack, ours)
        if stack.side in final_norms and not isinstance(ours.top_norm, nn.Identity):
            yield from _module_twins(final_norms[stack.side], ours.top_norm)


def _stack_twins(stack: ForeignStack, ours: Any) -> Iterator[Twin]:
    for (_, layer, theirs), own in zip(stack.sublayers(), ours.sublayers(), strict=True):
        added: Any = layer.get_submodule(attribute(theirs.kind))
        rows: dict[str, int] = {}
        for matrix in theirs.matrices:
            projection = _projection(own.f, matrix, rows)
            first = rows.get(projection, 0)
            rows[projection] = last = first + len(matrix.values)
            for name in ("weight", "bias"):
                yield _theirs(matrix, name), _rows(own.f.get_submodule(projection), name, first, last)
        yield from _module_twins(theirs.norm, own.pre_norm if stack.norm_first else own.out_norm)
        if not stack.norm_first:
            yield from _module_twins(added.pre_norm, own.pre_norm)
        pairs = [(added.inner_norm, own.f.inner_norm), (added.post_norm, own.post_norm), (added.input_norm, ours.input_norm)]
        if theirs.heads:
            pairs.append((added.head_scale, own.f.head_scale))
        pairs += [(getattr(added, name), getattr(own, name)) for name in ("branch", "skip")]
        for one, other in pairs:
            if list(one.parameters()):
                yield from _module_twins(one, other)


def _projection(f: Any, matrix: Matrix, rows: dict[str, int]) -> str:
    if matrix.role in (Role.ATTENTION_OUTPUT, Role.FFN_OUT):
        return "output"
    if matrix.role is Role.FFN_IN:
        return "input"
    if hasattr(f, "query_key_value"):
        return "query_key_value"
    return "key_value" if "query" in rows else "query"


def _theirs(matrix: Matrix, name: str) -> Callable[[str], Tensor | None]:
    def get(kind: str) -> Tensor | None:
        whole = getattr(getattr(matrix.owner, matrix.weight if name == "weight" else matrix.bias), kind)
        if whole is None:
            return None
        turned = whole.t() if matrix.transposed and name == "weight" else whole
        return turned.chunk(matrix.parts)[matrix.part]

    return get


def _rows(projection: Any, name: str, first: int, last: int) -> Callable[[str], Tensor | None]:
    def get(kind: str) -> Tensor | None:
        whole = getattr(getattr(projection, name), kind)
        return None if whole is None else whole[first:last]

    return get


def _module_twins(theirs: nn.Module, ours: nn.Module) -> Iterator[Twin]:
    own = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        yield (lambda kind, it=parameter: getattr(it, kind)), (lambda kind, it=own[name]: getattr(it, kind))


def _given(memory: Tensor | None) -> Tensor:
    assert memory is not None
    return memory
