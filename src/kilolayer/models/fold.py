"""Rewrite a model with scaled residuals exactly as a plain Post-LN Transformer.

    LN(w . x + f(x)), x = g . n + b, n the output of the norm before

is the Post-LN sublayer LN(x' + f'(x')) on x' = w . x: multiply g and b of the norm before by w, and divide by w the columns
of every matrix that reads x. A stack's first sublayer has no norm before it. If its w is a single number,
LN(w x + f(x)) = LN(x + f(x) / w) with eps / w^2; if it is a vector, w is merged into the embedding and position tables.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kilolayer import recipes
from kilolayer.errors import FoldError
from kilolayer.layers.attention import CrossAttention, SelfAttention
from kilolayer.layers.feedforward import FeedForward
from kilolayer.layers.grid_positions import LearnedGrid
from kilolayer.layers.multiway import each_way
from kilolayer.layers.norms.base import Norm, norm_class
from kilolayer.layers.position import LearnedPositions, sinusoids
from kilolayer.layers.scale import Constant, LayerConstant, LearnedScale
from kilolayer.layers.stack import Stack
from kilolayer.layers.sublayer import Sublayer
from kilolayer.models.build import build_model
from kilolayer.models.config import ModelConfig
from kilolayer.models.decoder import Decoder
from kilolayer.models.encoder import Encoder
from kilolayer.models.encoder_decoder import EncoderDecoder
from kilolayer.models.image_encoder import ImageEncoder
from kilolayer.moe.layer import SparseFeedForward
from kilolayer.moe.shard import refuse_part
from kilolayer.recipes.base import NORM, Plan, Side

AnyModel = Encoder | Decoder | EncoderDecoder

# The projections that read the residual stream, by function of a sublayer.
READERS: dict[type[nn.Module], tuple[str, ...]] = {
    SelfAttention: ("query_key_value",),
    CrossAttention: ("query",),
    FeedForward: ("input",),
    SparseFeedForward: ("router", "experts.input"),
}


@torch.no_grad()
def fold(model: AnyModel, *, max_length: int | None = None) -> AnyModel:
    """A new plain Post-LN model that computes the same function, with copies of the weights.

    max_length: how many positions to write out if a trained residual vector scales sinusoidal positions, which then become a
    learned table; that of an image encoder is as long as its grid. Intermediate hidden states are scaled; outputs are equal.
    Raises if the recipe has no such form.
    """
    _check(model)
    # A norm on the embedded input takes the first scale, as every norm takes that of the sublayer after it.
    normed = model.config.embedding_norm
    firsts: dict[Side, Tensor | None] = {
        stack.side: None if normed else _scale(stack.sublayers()[0]) for stack in model.stacks()
    }
    vectors = any(_number(scale) is None for scale in firsts.values() if scale is not None)
    if vectors and model.embedding is None and model.config.image is None:
        raise FoldError(
            "a trained residual vector on the first sublayer has no embedding table to go into",
            fix="multiply the embeddings by it yourself, or train with a fixed w",
        )
    tabulates = vectors and model.config.positions == "sinusoidal" and model.config.image is None
    if max_length is not None and not tabulates:
        raise FoldError("max_length has no effect here", fix="it applies to trained residual vectors with sinusoidal positions")
    plain = _empty(model, firsts, untied=vectors, max_length=max_length)
    _copy_weights(model, plain)
    if vectors:
        _scale_inputs(model, plain, firsts)
    for stack, plain_stack in zip(model.stacks(), plain.stacks(), strict=True):
        _fold_stack(stack, plain_stack, into_embedding=vectors)
    return plain.train(model.training)


def _first_eps(config: ModelConfig, side: Side, scale: Tensor | None) -> float | None:
    """The eps of a plain stack's first norm, if a single number on its residual is divided out."""
    number = None if scale is None else _number(scale)
    before = config.first_eps(side)
    if number is None or number == 1.0:
        return before
    return (config.norm_eps if before is None else before) / number**2


def _check(model: AnyModel) -> None:
    if not isinstance(model, AnyModel):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise FoldError(
            f"{type(model).__name__} is not a Kilolayer model",
            fix="give an Encoder, a Decoder or an EncoderDecoder; for a model that kl.adapt has changed, use kl.bake",
        )
    refuse_part(model)
    if model.config.patch_decoder is not None:
        raise FoldError(
            "its decoder has the recipe too", fix="fold a model without image.decoder that has its encoder's weights"
        )
    if isinstance(model, ImageEncoder) and model.map_head is not None and model.map_head.depths:
        raise FoldError("its map head reads the states between layers, which would be scaled", fix="keep the model as it is")
    recipe, norms = model.config.recipe, norm_class(model.config.norm)
    if not norms.is_homogeneous:
        raise FoldError(
            f"its norms are {norms.words()}, through which no residual scale can be moved", fix="keep the model as it is"
        )
    for stack in model.stacks():
        plans = [sublayer.plan for sublayer in stack.sublayers()]
        start: dict[str, Any] = {"gains": {}, "init": Plan().init}
        plain = all(replace(plan, skip=1.0, **start) == Plan(out_norm=NORM) for plan in plans)
        above = (stack.top_norm, stack.top_shift, stack.top_scale, stack.output_scale)
        bare = not recipe.input_norm(stack.side, model.config.depths) and all(isinstance(each, nn.Identity) for each in above)
        if not plain or not bare or recipe.stream() is not None:
            raise FoldError(
                f"the recipe {recipe.name!r} has no exact plain Post-LN form",
                where=f"its equation is {recipe.equation}",
                fix="fold takes models whose sublayers are LN(w x + f(x))",
            )
        for index, sublayer in enumerate(stack.sublayers()):
            scale = _scale(sublayer)
            if scale is not None and bool((scale == 0).any()):
                raise FoldError(f"the residual scale of {stack.side} sublayer {index + 1} holds a 0: it cannot be divided out")


def _empty(model: AnyModel, firsts: dict[Side, Tensor | None], untied: bool, max_length: int | None) -> AnyModel:
    config = replace(model.config, recipe=recipes.get(recipes.PLAIN), final_norm=None)
    if not untied:
        epsilons = {f"{side}_first_eps": _first_eps(config, side, scale) for side, scale in firsts.items()}
        config = replace(config, **epsilons)
    else:
        if config.image is None:
            config = replace(config, tie_embeddings=config.head is not None)
        if config.positions == "sinusoidal":
            if max_length is None and config.image is None:
                raise FoldError(
                    "a trained residual vector scales the sinusoidal positions, which must become a table",
                    fix="set its length: fold(model, max_length=1024)",
                )
            config = replace(config, positions="learned", max_length=max_length)
    weight = next(model.parameters())
    return build_model(config, device="meta", dtype=weight.dtype, seed=model.seed).materialize(weight.device)


def _copy_weights(model: AnyModel, plain: AnyModel) -> None:
    theirs = {name.replace("._orig_mod", ""): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    ours = plain.state_dict(keep_vars=True)
    foreign = sorted(name for name in theirs.keys() ^ ours.keys() if ".f." in name)
    if foreign:
        raise FoldError("a sublayer holds a module that fold does not know", where=foreign[0], fix="merge or remove it first")
    for name, tensor in ours.items():
        if name in theirs:
            tensor.copy_(theirs[name])
        if isinstance(tensor, nn.Parameter):
            tensor.requires_grad_(name not in theirs or theirs[name].requires_grad)


def _scale_inputs(model: AnyModel, plain: AnyModel, scales: dict[Side, Tensor | None]) -> None:
    """Multiply the first residual scale of each stack into its embedding and position tables, and untie the output table."""
    if model.embedding is not None:
        assert plain.embedding is not None
        source_table = model.embedding.weight
        if isinstance(model, EncoderDecoder) and isinstance(plain, EncoderDecoder):
            assert plain.source_embedding is not None
            own = model.source_embedding
            plain.source_embedding.weight.copy_((own or model.embedding).weight * _or_one(scales["encoder"]))
        plain.embedding.weight.copy_(source_table * _or_one(scales[plain.stacks()[-1].side]))
        if isinstance(plain, Encoder) and plain.token_types is not None:
            plain.token_types.weight.mul_(_or_one(scales["encoder"]))
        if plain.vocabulary is not None:
            plain.vocabulary.weight.copy_(source_table if model.vocabulary is None else model.vocabulary.weight)
    if isinstance(model, ImageEncoder) and isinstance(plain, ImageEncoder):
        _scale_patches(model, plain, _or_one(scales["encoder"]))
    for stack, plain_stack in zip(model.stacks(), plain.stacks(), strict=True):
        tables, ours = each_way(plain_stack.positions.at_input), each_way(stack.positions.at_input)
        for index, table in enumerate(tables):
            if not isinstance(table, LearnedPositions):
                continue
            own = ours[index % len(ours)]
            if isinstance(own, LearnedPositions):
                rows = own.weight
            else:
                positions = torch.arange(len(table.weight), device=table.weight.device)
                rows = sinusoids(positions, table.weight.shape[1], table.weight.dtype)
            table.weight.copy_(rows * _or_one(scales[stack.side]))


def _scale_patches(model: ImageEncoder, plain: ImageEncoder, scale: Tensor | float) -> None:
    projection = plain.patches.projection
    projection.weight.mul_(scale[:, None] if isinstance(scale, Tensor) and scale.dim() else scale)
    for vector in (projection.bias, *plain.patches.parameters(recurse=False)):
        vector.mul_(scale)
    if isinstance(plain.positions, LearnedGrid):
        at_zero = torch.zeros_like(plain.positions.weight)[None]
        plain.positions.weight.copy_(model.positions(at_zero, model.grid)[0] * scale)


def _fold_stack(stack: Stack, plain: Stack, into_embedding: bool) -> None:
    before = None if isinstance(plain.input_norm, nn.Identity) else plain.input_norm
    for sublayer, target in zip(stack.sublayers(), plain.sublayers(), strict=True):
        scale = _scale(sublayer)
        norm = target.out_norm
        assert all(isinstance(each, Norm) for each in each_way(norm))
        if scale is not None:
            if before is not None or into_embedding:
                for reader in READERS[type(target.f)]:
                    for module in each_way(target.f.get_submodule(reader)):
                        _weight(module).div_(scale)
                for parameter in before.parameters() if before is not None else ():
                    parameter.mul_(scale)
            else:
                for parameter in target.f.get_submodule("output").parameters():
                    parameter.div_(scale)
        before = norm


def _scale(sublayer: Sublayer) -> Tensor | None:
    """The residual scale as a tensor that broadcasts over [dim]; None if it is 1."""
    match sublayer.skip:
        case LearnedScale() as learned:
            return learned.weight.detach()
        case Constant() | LayerConstant() as constant:
            weight = next(sublayer.parameters())
            return torch.as_tensor(constant.value, dtype=weight.dtype, device=weight.device)
        case _:
            return None


def _number(scale: Tensor) -> float | None:
    """The value of `scale` if all its elements are equal, else None."""
    values = scale.flatten()
    return float(values[0]) if bool((values == values[0]).all()) else None


def _or_one(scale: Tensor | None) -> Tensor | float:
    return 1.0 if scale is None else scale


def _weight(projection: nn.Module) -> Tensor:
    """A matrix [outputs, inputs], or one per expert."""
    weight = projection.weight
    assert isinstance(weight, Tensor)
    return weight
