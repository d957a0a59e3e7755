"""Export to a CTranslate2 folder, through the specification that its own converters use."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from kilolayer import hints
from kilolayer.data.tokenizer import Tokenizers
from kilolayer.errors import InputError, OptionError
from kilolayer.files.reading import read_bytes
from kilolayer.huggingface.foreign_class import is_plain
from kilolayer.huggingface.form import folded, is_plain_stack, without_unused_tokens
from kilolayer.huggingface.source import Source
from kilolayer.layers.norms.base import norm_class
from kilolayer.layers.stack import Stack
from kilolayer.models.encoder_decoder import EncoderDecoder
from kilolayer.models.fold import AnyModel
from kilolayer.models.spelled_out import spell_out
from kilolayer.recipes.base import NORM, Plan

TOKENIZER_FILES = ("tokenizer.model", "tokenizer.target.model")
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "silu": "SWISH"}
"""Activation names: Kilolayer's to CTranslate2's."""


def ctranslate2_files(source: Source) -> tuple[str, dict[str, bytes]]:
    """Why the model fits, and the names and contents of all files but the README."""
    specs = _import_specs()
    model = without_unused_tokens(folded(source.model, source.positions))
    left_out = source.model.config.first_predicted - model.config.first_predicted
    _check(source, model)
    plain = spell_out(model, source.positions)
    assert isinstance(plain, EncoderDecoder)
    tokenizers = Tokenizers.load(source.folder)
    kind = "its layers are Pre-LN" if is_plain(model.config, Plan(pre_norm=NORM)) else "it has a plain Post-LN form"
    with tempfile.TemporaryDirectory() as folder:
        _specification(specs, plain, tokenizers, left_out).save(folder)
        files = {path.name: read_bytes(path, most=path.stat().st_size) for path in sorted(Path(folder).iterdir())}
    sides = [tokenizers.source.model] if tokenizers.shared else [tokenizers.source.model, tokenizers.target.model]
    files |= dict(zip(TOKENIZER_FILES, sides, strict=False))
    return f"the recipe is {source.model.config.recipe.title}: {kind}", files


def _import_specs() -> Any:
    try:
        from ctranslate2 import specs
    except ImportError:
        raise OptionError(
            "exporting to CTranslate2 needs the package ctranslate2",
            where=hints.argument("to"),
            fix="pip install 'kilolayer[export]'",
        ) from None
    return specs


def _check(source: Source, model: AnyModel) -> None:
    config = model.config
    reasons = {
        "it is no translator": config.shape != "encoder_decoder",
        f"its layers are not plain: {config.recipe.equation}": not is_plain_stack(model),
        "it has no final norm": config.final_norm is False,
        "it has experts": config.moe is not None,
        f"its norms are {norm_class(config.norm).words()}": config.norm != "layer",
        "its queries and keys are normalized (qk_norm)": config.qk_norm,
        "it has fewer heads of keys and values than of queries": config.kv_heads not in (None, config.heads),
        f"its activation is {config.activation}": config.activation not in ACTIVATIONS,
        "it has a norm on its embeddings": config.embedding_norm,
        f"its first {config.first_predicted} tokens have no probability": config.first_predicted > 0,
        f"its positions are {config.positions}": config.positions not in ("sinusoidal", "learned"),
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise InputError(
            "CTranslate2 does not support this model",
            where=f"{source.folder}: {'; '.join(found)}",
            fix=f"export it with {hints.argument('to', 'huggingface')}",
        )


def _specification(specs: Any, plain: EncoderDecoder, tokenizers: Tokenizers, left_out: int) -> Any:
    from ctranslate2.specs.common_spec import Activation

    config, before = plain.config, is_plain(plain.config, Plan(pre_norm=NORM))
    activation = Activation[ACTIVATIONS[config.activation]]
    depths = (config.depths.encoder, config.depths.decoder)
    spec = specs.TransformerSpec.from_config(depths, config.heads, pre_norm=before, activation=activation)
    assert plain.source_embedding is not None
    assert plain.vocabulary is not None
    _fill_stack(spec.encoder, spec.encoder.embeddings[0], plain.encoder, plain.source_embedding, before)
    _fill_stack(spec.decoder, spec.decoder.embeddings, plain.decoder, plain.embedding, before)
    spec.decoder.projection.weight = _array(plain.vocabulary.weight)
    if plain.output_bias is not None:
        spec.decoder.projection.bias = _array(plain.output_bias.weight)
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = config.norm_eps
    spec.register_source_vocabulary(_pieces_read(tokenizers)[left_out:])
    spec.register_target_vocabulary(tokenizers.target.pieces[left_out:])
    spec.validate()
    spec.optimize()
    return spec


def _pieces_read(tokenizers: Tokenizers) -> list[str]:
    """The source's pieces. Those of the target only are renamed, so that an unknown letter is not found among them."""
    source = tokenizers.source
    if tokenizers.shared:
        return source.pieces
    return [f"<unused {token}>" if source.is_unused(token) else piece for token, piece in enumerate(source.pieces)]


def _fill_stack(spec: Any, embeddings: Any, stack: Stack, table: Any, before: bool) -> None:
    norm_name = "pre_norm" if before else "out_norm"
    embeddings.weight = _array(table.weight)
    spec.scale_embeddings = False
    spec.position_encodings.encodings = _array(stack.positions.at_input.weight)
    for layer, block in zip(spec.layer, stack.blocks, strict=True):
        sublayers: Any = block
        own = sublayers.self_attention
        _fill_linear(layer.self_attention.linear[0], own.f.query_key_value)
        _fill_linear(layer.self_attention.linear[1], own.f.output)
        _fill_norm(layer.self_attention.layer_norm, getattr(own, norm_name))
        if stack.side == "decoder":
            reading = sublayers.cross_attention
            _fill_linear(layer.attention.linear[0], reading.f.query)
            _fill_linear(layer.attention.linear[1], reading.f.key_value)
            _fill_linear(layer.attention.linear[2], reading.f.output)
            _fill_norm(layer.attention.layer_norm, getattr(reading, norm_name))
        _fill_linear(layer.ffn.linear_0, sublayers.feedforward.f.input)
        _fill_linear(layer.ffn.linear_1, sublayers.feedforward.f.output)
        _fill_norm(layer.ffn.layer_norm, getattr(sublayers.feedforward, norm_name))
    if before:
        _fill_norm(spec.layer_norm, stack.top_norm)


def _fill_linear(spec: Any, projection: Any) -> None:
    spec.weight, spec.bias = _array(projection.weight), _array(projection.bias)


def _fill_norm(spec: Any, norm: Any) -> None:
    spec.gamma, spec.beta = _array(norm.weight), _array(norm.bias)


def _array(tensor: Any) -> Any:
    return tensor.detach().to(torch.float32).numpy().copy()
