"""Rewrite a model so that its inputs are plain tables, for classes without embedding scale, sinusoids and per-norm eps.

    x = sqrt(d) E[token] + sin/cos(position)

becomes x = E'[token] + P[position]. If a folded stack's first norm has a different eps_1, then with s^2 = eps / eps_1

    LN_{eps_1}(x + f(x)) = LN_eps(s x + s f(x)):

s is multiplied into E', P and the output of the first f, and divided out of the projections that read x.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from kilolayer.errors import FoldError
from kilolayer.layers.attention import SelfAttention
from kilolayer.layers.position import LearnedPositions, sinusoids
from kilolayer.layers.stack import Stack
from kilolayer.models.build import build_model
from kilolayer.models.decoder import Decoder
from kilolayer.models.encoder_decoder import EncoderDecoder
from kilolayer.models.fold import AnyModel


@torch.no_grad()
def spell_out(model: AnyModel, max_length: int) -> Decoder | EncoderDecoder:
    """A new model that computes the same function, with unscaled embeddings, learned positions and untied tables.

    max_length: the number of positions to tabulate if they are sinusoidal; a learned table keeps its length.
    """
    config = model.config
    if not isinstance(model, Decoder | EncoderDecoder):
        fix = "export it by a class that has the positions and scales of its inputs"
        raise FoldError(f"{type(model).__name__} is no decoder and no translator", fix=fix)
    if config.positions not in ("sinusoidal", "learned"):
        raise FoldError(
            f"{config.positions} positions are not a table at the input", fix="use a model with sinusoidal or learned ones"
        )
    plain_config = replace(
        config,
        scale_embeddings=False,
        positions="learned",
        max_length=max_length if config.positions == "sinusoidal" else config.max_length,
        tie_embeddings=False,
        encoder_first_eps=None,
        decoder_first_eps=None,
    )
    weight = next(model.parameters())
    plain = build_model(plain_config, device="meta", dtype=weight.dtype, seed=model.seed).materialize(weight.device)
    ours, theirs = plain.state_dict(keep_vars=True), model.state_dict()
    for name in ours.keys() & theirs.keys():
        ours[name].copy_(theirs[name])
    scales = {stack.side: _first_scale(model, stack) for stack in model.stacks()}
    assert isinstance(plain, Decoder | EncoderDecoder)
    if isinstance(model, EncoderDecoder) and isinstance(plain, EncoderDecoder):
        assert plain.source_embedding is not None
        source = model.source_embedding or model.embedding
        plain.source_embedding.weight.copy_(source.weight * (source.scale * scales["encoder"]))
    last = scales[plain.stacks()[-1].side]
    plain.embedding.weight.copy_(model.embedding.weight * (model.embedding.scale * last))
    assert plain.vocabulary is not None
    plain.vocabulary.weight.copy_((model.vocabulary or model.embedding).weight)
    for stack in plain.stacks():
        _write_positions(stack, config.positions == "sinusoidal", scales[stack.side])
        _scale_first(stack, scales[stack.side])
    return plain.train(model.training)


def _first_scale(model: Decoder | EncoderDecoder, stack: Stack) -> float:
    """The factor s of a stack; 1 if its first norm has the common eps."""
    first = model.config.first_eps(stack.side)
    return 1.0 if first is None else (model.config.norm_eps / first) ** 0.5


def _write_positions(stack: Stack, computed: bool, scale: float) -> None:
    table = cast("LearnedPositions", stack.positions.at_input).weight
    if computed:
        positions = torch.arange(len(table), device=table.device)
        table.copy_(sinusoids(positions, table.shape[1], table.dtype))
    table.mul_(scale)


def _scale_first(stack: Stack, scale: float) -> None:
    attention = stack.sublayers()[0].f
    assert isinstance(attention, SelfAttention)
    attention.query_key_value.weight.div_(scale)
    for parameter in attention.output.parameters():
        parameter.mul_(scale)
