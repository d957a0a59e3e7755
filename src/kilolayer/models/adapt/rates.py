"""Factors on the learning rate, eps and weight decay of the weights of torch's and Transformers' models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from kilolayer.layers.scale import LearnedScale
from kilolayer.models.adapt.additions import Additions
from kilolayer.models.adapt.applied import additions_of, is_adapted
from kilolayer.models.adapt.stacks import ForeignStack, stacks_of
from kilolayer.models.adapt.sublayers import ForeignSublayer
from kilolayer.recipes.base import Part, Rates
from kilolayer.recipes.role import Role

POSITIONS = ("position", "wpe")
"""What the name of a table of positions contains."""


def foreign_layer_rates(model: nn.Module, decay: float) -> dict[nn.Parameter, float]:
    """The factor on the learning rate by depth: decay^(L - l) in layer l of a stack of L, counted from 1.

    Tables of tokens, positions and sentence types, and what else a class has in its embeddings, are below the first layer, and
    have decay^L with the L of the deepest stack; so does a recipe's norm before the first layer, with the L of its own. Weights
    that are not listed are above all layers and have the factor 1. Empty if there is no layer of a known class.
    """
    stacks = stacks_of(model)
    rates: dict[nn.Parameter, float] = {}
    if not stacks:
        return rates
    below = decay ** max(len(stack.layers) for stack in stacks)
    norms = {stack.embedding_norm for stack in stacks}
    for module in model.modules():
        if isinstance(module, nn.Embedding) or type(module).__name__.endswith("Embeddings") or module in norms:
            rates |= dict.fromkeys(module.parameters(), below)
    for stack in stacks:
        for number, layer in enumerate(stack.layers, 1):
            rates |= dict.fromkeys(layer.parameters(), decay ** (len(stack.layers) - number))
        for part in stack.layers[0].children():
            if isinstance(part, Additions):
                rates |= dict.fromkeys(part.input_norm.parameters(), decay ** len(stack.layers))
    return rates


def adapted_rates(model: nn.Module) -> dict[nn.Parameter, Rates]:
    """The factors that recipes given by `adapt` define for the weights of `model`; weights that are not listed have none.

    What belongs to no stack has the factors of the first stack if it is a table, and of the last one otherwise.
    """
    rates: dict[nn.Parameter, Rates] = {}
    if not is_adapted(model):
        return rates
    parts = [(stack, [*additions_of(stack)]) for stack in stacks_of(model)]
    owners = sorted((_StackRates(*each) for each in parts if each[1]), key=lambda owner: owner.stack.side == "decoder")
    outputs = {each for each in map(_output_table, model.modules()) if each is not None}
    for owner in owners:
        _add(rates, owner.inside())
    for owner in owners:
        _add(rates, ((weight, owner.rates(kind)) for weight, kind in _outside(owner.stack.holder, outputs)))
    first, last = owners[0], owners[-1]
    tables = (Part.EMBEDDING, Part.POSITIONS)
    _add(rates, ((weight, (first if kind in tables else last).rates(kind)) for weight, kind in _outside(model, outputs)))
    return rates


class _StackRates:
    """The factors of the weights of one adapted stack."""

    def __init__(self, stack: ForeignStack, parts: list[tuple[nn.Module, ForeignSublayer, Additions]]) -> None:
        self.stack, self.parts = stack, parts

    def rates(self, weight: Role | Part) -> Rates:
        """Those of a weight of this kind."""
        _, sublayer, additions = self.parts[0]
        return additions.recipe.rates(weight, self.stack.side, additions.depths, sublayer.width)

    def inside(self) -> Iterator[tuple[nn.Parameter, Rates]]:
        """Every weight of the layers with its factors."""
        for _, sublayer, additions in self.parts:
            for matrix in sublayer.matrices:
                yield getattr(matrix.owner, matrix.weight), self.rates(matrix.role)
                bias = getattr(matrix.owner, matrix.bias, None)
                if bias is not None:
                    yield bias, self.rates(Part.BIAS)
            for weight in sublayer.norm.parameters():
                yield weight, self.rates(Part.NORM)
            yield from self._added(additions)
        for layer in self.stack.layers:
            for weight in layer.parameters():  # what is left: a table of relative positions
                yield weight, self.rates(Part.POSITIONS)

    def _added(self, additions: Additions) -> Iterator[tuple[nn.Parameter, Rates]]:
        for name, part in additions.named_children():
            kind = Part.TOP if name == "input_norm" else Part.NORM if name.endswith("_norm") else Part.SCALE
            found = self.rates(kind)
            for weight in part.parameters():
                yield weight, replace(found, lr=found.lr * part.rate) if isinstance(part, LearnedScale) else found


def _add(rates: dict[nn.Parameter, Rates], found: Iterable[tuple[nn.Parameter, Rates]]) -> None:
    """Add factors; those that a weight already has stay."""
    for weight, own in found:
        rates.setdefault(weight, own)


def _output_table(module: nn.Module) -> nn.Module | None:
    """The matrix of a model of Transformers that scores the vocabulary."""
    theirs: Any = module
    return theirs.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None


def _outside(root: nn.Module, outputs: set[nn.Module]) -> Iterator[tuple[nn.Parameter, Role | Part]]:
    """Every weight below `root` with its kind, if it is not in a layer."""
    for path, module in root.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if module in outputs:
                yield weight, Part.VOCABULARY if name == "weight" else Part.TOP
            elif any(word in f"{path.rpartition('.')[2]}.{name}" for word in POSITIONS):
                yield weight, Part.POSITIONS
            elif isinstance(module, nn.Embedding):
                yield weight, Part.EMBEDDING
            else:
                yield weight, Role.HEAD if isinstance(module, nn.Linear) and name == "weight" else Part.TOP
