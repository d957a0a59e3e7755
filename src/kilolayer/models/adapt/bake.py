"""Merge the scales of a recipe into the weights, which leaves a plain model of its own library.

    N(w . x + f(x)), x = g . n + b, n the output of the norm before

is the plain sublayer N(x' + f'(x')) on x' = w . x: g and b of the norm before are multiplied by w, and the columns of the
matrices that read x are divided by it. A stack's first sublayer has a norm before it if the class normalizes its embeddings,
and the first of a layer in a user's own block has none, because the block may change x. Without a norm before, if w is a
number, N(w x + f(x)) = N(x + f(x) / w) with eps / w^2. A scale on the branch is merged into the last projection of f, and a
scale on the input of f into the projections that read it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kilolayer.errors import FoldError, InputError
from kilolayer.layers.scale import LearnedScale, factor_of
from kilolayer.models.adapt.additions import Additions, attribute
from kilolayer.models.adapt.applied import additions_of
from kilolayer.models.adapt.pretrained import detach_save
from kilolayer.models.adapt.stacks import ForeignStack, find
from kilolayer.models.adapt.sublayers import ForeignSublayer, eps_name
from kilolayer.models.adapt.weights import check_weights

Part = tuple[nn.Module, ForeignSublayer, Additions, nn.Module | None]
"""A layer, one of its sublayers with what a recipe added, and the norm whose output that sublayer reads."""


@dataclass(frozen=True)
class Baked:
    """What `bake` did.

    sublayers: the number that were merged.
    own_eps: the names of norms that now have a different eps. A configuration holds only one eps for all norms, so a model that
    is loaded again uses that one, and its outputs differ slightly.
    """

    sublayers: int
    own_eps: dict[str, float]

    def __str__(self) -> str:
        own = "".join(f"\n  {name} has an eps of its own: {eps:.3g}" for name, eps in self.own_eps.items())
        return (
            f"{self.sublayers} sublayers merged into plain weights; do not train further, or apply the recipe again first{own}"
        )

    __repr__ = __str__


@torch.no_grad()
def bake(model: nn.Module) -> Baked:
    """Merge the recipe of an adapted model into its weights, in place, and remove the hooks: the function stays the same.

    The result is a plain model of its own library, to run, save and share. Training it further differs from training with the
    recipe, because the weights are scaled. Norms inside the sublayers have no plain form; with them it raises an error.
    """
    found = find(model)
    stacks = found.stacks
    parts = [_parts(stack) for stack in stacks]
    if not any(parts):
        raise InputError("this model has no recipe", fix="kl.bake takes a model that kl.adapt has changed")
    check_weights(model, found)
    for stack, own in zip(stacks, parts, strict=True):
        _check(stack, own)
    names = {module: name for name, module in model.named_modules()}
    own_eps: dict[str, float] = {}
    for own in parts:
        for layer, sublayer, additions, before in own:
            eps = _write(sublayer, additions, before)
            additions.detach()
            delattr(layer, attribute(sublayer.kind))
            if eps is not None:
                setattr(sublayer.norm, eps_name(sublayer.norm), eps)
                own_eps[names[sublayer.norm]] = eps
    detach_save(model)
    return Baked(sum(map(len, parts)), own_eps)


def _parts(stack: ForeignStack) -> list[Part]:
    parts: list[Part] = []
    before = stack.embedding_norm
    for layer, sublayer, additions in additions_of(stack):
        starts_block = stack.in_blocks and not (parts and parts[-1][0] is layer)
        parts.append((layer, sublayer, additions, None if starts_block else before))
        before = sublayer.norm
    return parts


def _check(stack: ForeignStack, parts: list[Part]) -> None:
    for index, (_, sublayer, additions, before) in enumerate(parts):
        where = f"{stack.side} sublayer {index + 1}, {sublayer.kind}"
        if additions.own_norms():
            raise FoldError(
                f"the recipe put modules into the sublayers that no weight can hold: {', '.join(additions.own_norms())}",
                where=where,
                fix="keep the recipe: kl.save writes the model with it, and kl.load_model reads it",
            )
        skip = _skip(additions)
        if isinstance(skip, Tensor) and before is None:
            raise FoldError(
                "a learned residual scale has no norm before it to go into",
                where=where,
                fix="train with a fixed one",
            )
        if isinstance(skip, Tensor) and bool((skip == 0).any()):
            raise FoldError("a residual scale holds a 0: it cannot be divided out", where=where)


def _write(sublayer: ForeignSublayer, additions: Additions, before: nn.Module | None) -> float | None:
    """Merge one sublayer's scales; returns the eps of its norm if that must differ from the others'."""
    _scale_rows(sublayer, factor_of(additions.branch))
    reading = factor_of(additions.in_scale)
    skip = _skip(additions)
    eps: float | None = None
    if before is not None:
        reading = reading / skip
        for parameter in before.parameters():
            parameter.mul_(skip)
    elif skip != 1:
        _scale_rows(sublayer, 1 / skip)
        eps = float(getattr(sublayer.norm, eps_name(sublayer.norm)))
    for matrix in sublayer.readers():
        matrix.values.mul_(reading)
    return eps


def _scale_rows(sublayer: ForeignSublayer, factor: float | Tensor) -> None:
    """Scale the output of f by a number, or by a vector [dim]."""
    matrix = sublayer.last
    matrix.values.mul_(factor[:, None] if isinstance(factor, Tensor) and factor.dim() else factor)
    if matrix.bias_values is not None:
        matrix.bias_values.mul_(factor)


def _skip(additions: Additions) -> float | Tensor:
    return additions.skip.weight if isinstance(additions.skip, LearnedScale) else additions.skip_number
